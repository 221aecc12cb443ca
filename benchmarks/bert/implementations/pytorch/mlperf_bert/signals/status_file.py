"""The file that tells how a run ended (`train --status-file`), where a launcher may hide it."""

import os
from contextlib import suppress
from pathlib import Path

from mlperf_bert.common.messages import say


def write_status(path: Path, status: int) -> bool:
    """Write or replace the file in one step; whether it is there now. Raises nothing.

    Several ranks may write it at once; readers see one whole status. A file that cannot be written
    is a warning on stderr.
    """
    # Ranks on two nodes may have the same process id.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        beside.write_text(f"{status}\n")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        say(f"warning: {path} cannot be written ({error.strerror}): it was to tell status {status}")
        return False
    return True
