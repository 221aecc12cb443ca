"""Write and read this program's safetensors files.

This module uses the safetensors library, adds a digest, and ensures that the data is on disk when
`write_tensors` returns. `huggingface/reader.py` reads the files of other programs.
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
    """Write tensors to a new file, flush the file to disk, and return its size and digest.

    The tensors must be contiguous, on the CPU, and must not share memory. Raises OSError if the
    file cannot be written.
    """
    from safetensors import SafetensorError  # here, because not all callers need the library
    from safetensors.torch import save_file

    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None
    path.chmod(mode)  # the library makes the file private to this user
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, file_sha256(path))


def read_tensors(path: Path, remedy: str = ELSE) -> dict[str, Tensor]:
    """Memory-map a safetensors file, and return its tensors by name.

    The caller must have verified the digest of the file. Raises CheckpointError if the file cannot
    be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), f"cannot be read ({error})", remedy) from None
