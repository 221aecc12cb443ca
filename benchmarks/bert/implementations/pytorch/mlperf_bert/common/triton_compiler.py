"""Whether Triton can compile kernels on this machine, found without importing it.

Triton compiles each kernel for the GPU by itself. It also compiles a launcher for the kernel, which
is a Python module in C, and for that it needs a C compiler and Python's header files. A machine
with only the Python packages lacks them, and the first kernel that runs there raises an error.

This file reads the environment, because Triton takes its C compiler from there.
"""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

_C_COMPILERS = ("gcc", "clang")  # programs that Triton searches for, if CC is not set


def why_triton_cannot_compile() -> str | None:
    """The reason why Triton cannot compile kernels here; None if it can.

    Nothing is compiled or measured, so the answer is always the same on a machine that does not
    change. The search for a compiler and headers is that of `triton/runtime/build.py` in
    Triton 3.7.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"the environment variable CC is {named!r}, and there is no such program"
    if named is None and not any(shutil.which(name) for name in _C_COMPILERS):
        return "there is no C compiler: neither gcc nor clang is installed"
    header = _directory_of_headers() / "Python.h"
    if not header.is_file():
        return f"{header} is missing; it is in the package python3-dev or python3-devel"
    return None


def _directory_of_headers() -> Path:
    """The directory in which Triton has its C compiler look for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's; it names a directory that has no headers
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
