"""Our tensors in safetensors files, written with a digest and read after checking it.

The library writes and reads; this file adds that data are on disk when the call returns.
`huggingface/reader.py` reads files of other programs.
"""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mlperf_bert.checkpoint.manifest import ELSE, FileEntry
from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import file_sha256

# Beginnings of the names that only a model with next-sentence prediction has.
NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new file, on disk when this returns; its size and digest.

    `tensors` are contiguous, on the CPU, and share no memory. Raises OSError.
    """
    from safetensors import SafetensorError  # code that reads no weights imports this file too
    from safetensors.torch import save_file

    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None
    path.chmod(mode)  # the library's file is private to this user
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, file_sha256(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file with a verified digest, mapped. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", ELSE) from None
