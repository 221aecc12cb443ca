"""A directory that is complete or absent: filled beside under another name, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlperf_bert.common.errors import CheckpointError

_NO_ROOM = "check the disk's free space and that it can be written"


@contextmanager
def new_directory(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a directory to fill; on success it becomes `path`, on failure it goes away.

    Args:
        path: must not be there, or be an empty directory.
        num_bytes: about as many as will be written.

    Raises:
        CheckpointError: there is something at `path` already, or it cannot be written.
    """
    path = Path(os.path.abspath(path))
    beside = path.with_name(f".{path.name or 'out'}.{os.getpid()}.partial")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(str(path), "is there already", "name a new directory")
        beside.mkdir(parents=True)
        if shutil.disk_usage(beside).free < num_bytes:
            problem = f"needs {num_bytes / 1e6:,.0f} MB, the disk has less"
            raise CheckpointError(str(path), problem, "name a directory elsewhere")
        yield beside
        beside.rename(path)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise CheckpointError(str(path), problem, _NO_ROOM) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
