"""Tensors in safetensors files: written with their digest, and read whoever wrote them.

The library writes and reads. Added here: a file that is on disk when the call returns, and the
refusal of what it would take: a pipe, a header beyond 8 MiB, and a name that is there twice.
"""

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.checkpoint.manifest import ELSE, FileEntry
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.untrusted import (
    MAX_JSON_BYTES,
    file_sha256,
    in_brief,
    open_regular_file,
    parse_json_object,
)

REMEDY = "give a file that is whole, as its source has it"

_PREFIX_BYTES = 8  # the header's length
_MOST_DIMENSIONS, _MOST_SIZE = 8, 2**40  # of a tensor, and of a dimension
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}  # the format's word -> ours
# Weights, and the whole numbers among which older files keep positions.
_READABLE = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "int32"))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new file and have it on disk when this returns; its size and digest.

    `tensors` are contiguous, on the CPU, and share no memory. Raises OSError.
    """
    from safetensors import SafetensorError  # who reads no weights imports this file too
    from safetensors.torch import save_file

    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None
    path.chmod(mode)  # the library's file is for nobody else
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, file_sha256(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file whose digest is right, mapped. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", ELSE) from None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Any  # the library's

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32.

        Raises CheckpointError where the file is cut short by now, or holds numbers of
        another kind there.
        """
        from safetensors import SafetensorError

        if self.dtype not in _READABLE:
            problem = f"{in_brief(self.name)} holds {self.dtype}"
            raise CheckpointError(str(self.path), problem, "give weights of 16, 32 or 64 bits")
        try:
            found = self.file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(self.path), f"is cut short ({error})", REMEDY) from None
        numbers: NDArray[Any] = (found.float() if self.dtype == "bfloat16" else found).numpy()
        return numbers


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, none of them read.

    Raises CheckpointError where the file is missing, no regular file or damaged. At most 8 MiB of
    header are read, and every tensor lies within the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        _check_header(path)
        # Not mapped: a file that is cut meanwhile would end this process.
        file: Any = safe_open(path, framework="pt", backend="pread")
    except SafetensorError as error:
        problem = f"is no whole safetensors file ({error})"
        raise CheckpointError(str(path), problem, REMEDY) from None
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or "cannot be read", REMEDY) from None
    except ValueError as error:
        problem = f"has a header that is not valid JSON ({error})"
        raise CheckpointError(str(path), problem, REMEDY) from None
    found = {}
    for name in file.keys():  # noqa: SIM118 (no mapping)
        about = file.get_slice(name)
        dtype = re.sub(r"^(BF|F|I|U)(?=\d)", lambda kind: _KINDS[kind[1]], about.get_dtype())
        shape = tuple(about.get_shape())
        if len(shape) > _MOST_DIMENSIONS or any(size > _MOST_SIZE for size in shape):
            raise CheckpointError(f"{path}: {in_brief(name)}", "is larger than any file", REMEDY)
        found[name] = StoredTensor(path, name, dtype.lower(), shape, file)
    return found


def _check_header(path: Path) -> None:
    """Refuse what the library takes. Raises OSError, ValueError."""
    with BufferedReader(open_regular_file(path)) as file:
        length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        if length > MAX_JSON_BYTES:
            raise OSError(0, f"has a header of more than {MAX_JSON_BYTES:,} bytes")
        parse_json_object(file.read(length))
