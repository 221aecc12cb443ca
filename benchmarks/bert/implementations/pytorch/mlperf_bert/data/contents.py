"""The check of the shards' bytes, in a thread beside training.

Sizes and sidecars do not show a flipped bit, and MLPerf forbids touching samples before the clock
starts. So the check begins right after `run_start`, and a run's first result waits for it. The
shards of a small pair of sets are hashed and compared with the manifests. Of a large pair only
blocks are read. No manifest knows their digest, so checkpoints keep it, and a resumed run compares.
"""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mlperf_bert.data.index import ShardEntry
from mlperf_bert.data.set_checks import SHARD_REMEDY
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.errors import DataError
from mlperf_bert.files import digest_error, open_regular_file, reading_error

if TYPE_CHECKING:
    from hashlib import _Hash

SMALL_BYTES = 2 * 2**30  # of all shards together, which are hashed in seconds
NUM_BLOCKS = 512
BLOCK_BYTES = 64 * 2**10
_BYTES_AT_A_TIME = 2**20
_LEAVE_S = 5.0  # a disk that does not answer must not hold up the end


class ContentsCheck:
    """A context that checks the shards in a thread; see above.

    Args:
        readers: of both sets; none on a rank whose node has another rank that checks.
        known: the digest of a large pair in the checkpoint that the run resumes from, if any.
        host: named in errors; empty if all ranks are on one.
    """

    def __init__(
        self, readers: Sequence[SampleReader], known: str | None = None, host: str = ""
    ) -> None:
        self._readers = readers
        self._known = known
        self._host = host
        self._is_left = threading.Event()
        self._found: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._check, name="contents", daemon=True)
        self.was_asked = False

    def __enter__(self) -> Self:
        """The clock has started: samples may be read."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading."""
        self._is_left.set()
        self._thread.join(_LEAVE_S)

    def result(self) -> str | None:
        """Wait for the end of the check; the digest of a large pair's blocks, else None.

        Raises DataError if a shard differs from its digest, or the blocks from those `known`.
        """
        self.was_asked = True
        return self._found.result()

    def _check(self) -> None:
        try:
            self._found.set_result(self._digest())
        except BaseException as error:  # raised where the result is asked for
            self._found.set_exception(error)

    def _digest(self) -> str | None:
        shards = [shard for reader in self._readers for shard in reader.shards]
        if sum(shard.sidecar.shard_bytes for shard in shards) <= SMALL_BYTES:
            for reader in self._readers:
                for shard, entry in zip(reader.shards, reader.manifest.shards, strict=True):
                    self._compare(shard, entry)
            return None
        found = self._digest_of_blocks(shards)
        if self._known not in (None, found):
            where = self._place(self._readers[0].set_dir.parent)
            problem = "has changed since the run began (blocks of its shards differ)"
            remedy = "put the shards back that `mlperf_bert verify --full` names, or begin anew"
            raise DataError(where, problem, remedy)
        return found

    def _compare(self, shard: Shard, entry: ShardEntry) -> None:
        digest = hashlib.sha256()
        places = range(0, shard.sidecar.shard_bytes, _BYTES_AT_A_TIME)
        self._add(digest, shard.path, places, _BYTES_AT_A_TIME)
        if digest.hexdigest() != entry.sha256:
            raise digest_error(self._place(shard.path), SHARD_REMEDY)

    def _digest_of_blocks(self, shards: Sequence[Shard]) -> str:
        """The digest of blocks at even distances over all shards, by their sizes alone."""
        digest = hashlib.sha256()
        total = sum(shard.sidecar.shard_bytes for shard in shards)
        starts = [number * total // NUM_BLOCKS for number in range(NUM_BLOCKS)]
        first = 0
        for shard in shards:
            end = first + shard.sidecar.shard_bytes
            places = [start - first for start in starts if first <= start < end]
            self._add(digest, shard.path, places, BLOCK_BYTES)
            first = end
        return digest.hexdigest()

    def _add(self, digest: "_Hash", path: Path, places: Iterable[int], num_bytes: int) -> None:
        """Add `num_bytes` from each of these places of a file on, fewer at its end."""
        try:
            with BufferedReader(open_regular_file(path)) as file:
                for place in places:
                    if self._is_left.is_set():
                        return  # nobody asks for the result
                    file.seek(place)
                    digest.update(file.read(num_bytes))
        except OSError as error:
            missing, where = "was removed while it was used", Path(self._place(path))
            raise reading_error(where, error, missing=missing, remedy=SHARD_REMEDY) from None

    def _place(self, path: Path) -> str:
        return f"{path} on {self._host}" if self._host else str(path)
