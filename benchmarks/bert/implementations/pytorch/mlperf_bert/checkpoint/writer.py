"""Write checkpoints in a background thread of each rank, while training continues.

Each rank first copies its share of the state to host memory. The ranks then write their files into
a directory whose name begins with a dot. Each rank except rank 0 then writes a note that lists its
files. Rank 0 waits for all notes, writes the manifest and renames the directory. A checkpoint is
therefore either complete or absent, and no thread needs a collective operation. All ranks must
share the file system of the directory.

Each shard of the optimizer state is a safetensors file, which a run with a different number of
shards can also read. For each parameter and each kind of state (slot), such as the first moment,
the file has a tensor `<parameter>.<slot>` with the elements that its rank owns. The tensor has the
parameter's shape if the rank owns the whole parameter, and is flat otherwise. `ranges` in the
metadata gives the owned elements as [first, last) of the flattened parameter. A tensor whose name
has no slot is a scalar, which is equal in all files.

Every rank also has its own random number generators and FP8 scales. This program's dropout needs no
generator, because it is keyed by seed, step and sample, but other kernels draw from torch's
generators. A rank's FP8 scales depend on the largest absolute values in its own samples.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mlperf_bert import package_version
from mlperf_bert.checkpoint.manifest import (
    FP8,
    FP8_UNIT,
    LATEST,
    MANIFEST,
    MODEL,
    RANK_STATES,
    REPLACED,
    STATE,
    CheckpointState,
    FileEntry,
    Manifest,
    discard,
    move_aside,
    prune,
    put_aside,
    step_directory,
    sweep,
)
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.config.files import config_to_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.flat_reducer import renamed
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.session import from_all_ranks, from_rank_zero, on_rank_zero
from mlperf_bert.errors import CheckpointError, UserError
from mlperf_bert.files import NO_ROOM, is_there, write_file
from mlperf_bert.optim.flat_optimizer import Copy, FlatOptimizer

POLL_S = 0.1
PATIENCE_S = 5.0  # how long a failed run waits for its writing thread
_GONE = "was renamed or removed during the run"
_SPARE_BYTES = 2**16  # for logs and metrics, and for the checkpoint's own names and headers

# A rank's files by name, each with its tensors on the host and its metadata.
Part = dict[str, tuple[Mapping[str, Tensor], Mapping[str, str]]]


class HostCopies:
    """Copies of tensors in host memory, which is allocated once and reused for each checkpoint.

    On CUDA the memory is pinned. A copy is therefore queued after earlier training work, and
    training continues before the copy is complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Queue a copy of `tensor` to host memory, and return the copy.

        The copy is complete after `wait`, and valid until the next copy with the same `name`.
        """
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[name] = self._memory_like(tensor)
        return kept.copy_(tensor, non_blocking=True)

    def queued(self) -> None:
        """Record that all copies of a checkpoint are queued. `wait` waits for these copies."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Wait until all queued copies are complete."""
        if self._event is not None:
            with torch.cuda.device(self._device):  # a new thread uses device 0
                self._event.synchronize()  # blocks only the writer's thread

    def _memory_like(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # if it cannot pin so much memory, copies will block
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype)


@torch.no_grad()
def snapshot_rank(
    optimizer: FlatOptimizer,
    fp8_state: Mapping[str, Tensor],
    info: RankInfo,
    device: torch.device,
    copies: HostCopies,
) -> Part:
    """Copy this rank's share of the training state, and return the files to write, by name.

    All ranks must call this function, between two steps. The copies are complete after
    `copies.wait`.
    """
    is_first = info.rank == 0
    weights = optimizer.exact_weights(keep=is_first, copy=copies)
    rank_states = gather_rank_states(fp8_state, info, device, copies)
    part: Part = {}
    if info.rank < optimizer.num_shards:
        part[f"optimizer/rank_{info.rank:05d}.safetensors"] = shard_tensors(optimizer, copies)
    if is_first:
        fp8 = {name: copies(f"fp8 {name}", each) for name, each in fp8_state.items()}
        part |= {MODEL: (weights, {}), FP8: (fp8, {}), RANK_STATES: (rank_states, {})}
    copies.queued()
    return {name: (tensors, metadata) for name, (tensors, metadata) in part.items() if tensors}


def shard_tensors(optimizer: FlatOptimizer, copy: Copy) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of this rank's optimizer shard and the metadata of their file.

    `copy` copies each tensor to the host.
    """
    scalars = optimizer.scalar_state().items()
    tensors = {name: copy(name, value) for name, value in scalars}
    flat_state = {slot: copy(slot, flat) for slot, flat in optimizer.flat_state().items()}
    ranges = {}
    for segment in optimizer.segments():
        ranges[segment.tensor.name] = [segment.first, segment.last]
        for slot, flat in flat_state.items():
            part = flat[segment.in_shard]
            shape = segment.tensor.shape if segment.is_whole else part.shape
            tensors[f"{segment.tensor.name}.{slot}"] = part.view(shape)
    return tensors, {"ranges": json.dumps(ranges)}


def gather_rank_states(
    fp8_state: Mapping[str, Tensor], info: RankInfo, device: torch.device, copy: Copy
) -> dict[str, Tensor]:
    """Gather the random number generators and FP8 scales of all ranks.

    `copy` copies each gathered tensor, [ranks, ...], to the host. Only rank 0 gets a result, and
    the other ranks get an empty dictionary. All ranks must call this function.
    """
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    mine |= {f"{FP8_UNIT}{name}": tensor for name, tensor in fp8_state.items()}
    gathered = {}
    for name, tensor in mine.items():
        own = tensor.to(device)[None]
        of_all = own
        if info.world_size > 1:
            of_all = own.new_empty((info.world_size, *tensor.shape))
            renamed("all_gather_into_tensor", "all_gather_single")(of_all, own)
        if info.rank == 0:
            gathered[name] = copy(f"of all ranks {name}", of_all)
    return gathered


def write_part(partial: Path, part: Part) -> dict[str, FileEntry]:
    """Write the files of one rank into `partial`, and return their entries for the manifest.

    Raises OSError if the files cannot be written or the disk has too little free space.
    """
    for folder in (partial, partial / "optimizer"):  # no parents, because they may be renamed
        folder.mkdir(exist_ok=True)
    wanted = sum(each.nbytes for tensors, _ in part.values() for each in tensors.values())
    # Checked before writing, because a full disk would also break logs and metrics.
    if shutil.disk_usage(partial).free < wanted + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return {name: write_tensors(partial / name, *each) for name, each in part.items()}


def leave_note(partial: Path, rank: int, entries: Mapping[str, FileEntry]) -> None:
    """Write a note for rank 0 that lists the files that this rank has written to disk."""
    values = {name: (entry.size, entry.sha256) for name, entry in entries.items()}
    write_file(_note(partial, rank), json.dumps(values).encode("ascii"))


def await_note(partial: Path, rank: int, abandoned: threading.Event) -> dict[str, FileEntry]:
    """Wait for a rank's note, delete it, and return the manifest entries of the rank's files.

    Raises InterruptedError once `abandoned` is set.
    """
    note = _note(partial, rank)
    while not note.exists():
        if abandoned.wait(POLL_S):
            raise InterruptedError("another rank failed")
    values = json.loads(note.read_text(encoding="ascii"))
    note.unlink()
    return {name: FileEntry(*entry) for name, entry in values.items()}


def complete(partial: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest, and rename the finished checkpoint to its final name. Raises OSError."""
    _write_bytes(partial / MANIFEST, manifest.to_json())
    for folder in (partial / "optimizer", partial):
        _flush_directory(folder)
    # A checkpoint of the same step is removed last, so that a kill in between does not lose it.
    replaced = move_aside(final, REPLACED) if is_there(final) else None
    partial.rename(final)
    _flush_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _note(partial: Path, rank: int) -> Path:
    return partial / f"note_{rank:05d}.json"


def _write_bytes(path: Path, contents: bytes) -> FileEntry:
    with path.open("xb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(contents), hashlib.sha256(contents).hexdigest())


def _flush_directory(path: Path) -> None:
    """Flush the entries of a directory to disk, if its file system supports that."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


class _Status(NamedTuple):
    """The status of one rank's writer thread, as the ranks exchange it."""

    is_busy: bool
    error: str | None
    moved_bytes: int
    gives_up: bool  # True if this rank would stop waiting, which only rank 0 decides


@dataclass(eq=False, repr=False)
class CheckpointWriter:
    """A writer of a run's checkpoints, which writes them into `directory`, one at a time.

    Every rank creates a writer. All ranks must call its methods together, except `leave` and
    `lines`. Rank 0 creates the directory and removes the unfinished files of a killed run.

    `after` is the step from which the run resumes, or None. The writer renames the checkpoints of
    later steps, because the run skipped them as damaged.
    """

    directory: Path
    optimizer: FlatOptimizer
    config: RunConfig
    info: RankInfo
    device: torch.device
    _: KW_ONLY
    fp8_state: Mapping[str, Tensor] = field(default_factory=dict)  # the model's own tensors
    keep_last: int | None = None  # how many of the newest checkpoints to keep, or None for all
    commit: str | None = None  # of the code
    after: int | None = None
    origin: Mapping[str, str] = field(default_factory=dict)  # of the weights the run started from

    def __post_init__(self) -> None:
        self._copies = HostCopies(self.device)
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._writing = 0  # step of the checkpoint that is being written
        self._abandoned = threading.Event()
        self._lines: list[str] = []
        # Distinguishes the files of this attempt from those of another attempt.
        self._token: str = from_rank_zero(self.info, os.urandom(4).hex())
        on_rank_zero(self.info, self._set_up)
        self._run = self.directory.absolute().parent
        self._run_fd: int | None = None  # file descriptor of the run's directory
        with suppress(OSError):
            self._run_fd = os.open(self._run, os.O_RDONLY)
            weakref.finalize(self, os.close, self._run_fd)
        self._has_said_gone = False

    def leave(self) -> None:
        """After the run has failed, wait a few seconds for an unfinished checkpoint."""
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def lines(self, *, check: bool = False) -> list[str]:
        """Return the messages of rank 0's writer thread since the last call.

        If `check` is True, a message also reports if the run's directory was renamed or removed.
        """
        lines, self._lines = self._lines, []
        if check:
            is_gone = not self._is_in_place()
            if is_gone and not self._has_said_gone:
                lines.append(f"{self._run} {_GONE}; no checkpoint is saved until it is back")
            self._has_said_gone = is_gone
        return lines

    def check_run_directory(self) -> None:
        """Raise CheckpointError on every rank if the run's directory was renamed or removed."""

        def check() -> None:
            if not self._is_in_place():
                remedy = "restore the directory's name, and then resume the run"
                raise CheckpointError(str(self._run), _GONE, remedy)

        on_rank_zero(self.info, check)

    def prepare(self) -> None:
        """Allocate the host memory for the copies now, not during the first checkpoint."""
        self._copy()

    def begin(self, state: CheckpointState) -> bool:
        """Start to write a checkpoint of the current state, and return True.

        The method returns once the copies of weights and state are complete or queued. If the
        previous checkpoint is still being written, the method does nothing and returns False.
        """
        if self._are_busy(self._statuses()):
            return False
        if self.info.rank == 0 and self._is_in_place():
            sweep(self.directory)
        self._writing, self._error = state.step, None
        self._abandoned.clear()
        part = self._copy()
        if part:
            self._thread = threading.Thread(
                target=self._work, args=(state, part), name="checkpoint", daemon=True
            )
            self._thread.start()
        return True

    def finish(self) -> None:
        """Wait until the current checkpoint is on disk.

        Raises CheckpointError on all ranks if the checkpoint could not be written, or if no rank
        wrote a byte for `run.hang_timeout_s` seconds.
        """
        moved, since = -1, time.monotonic()
        while True:
            silent_s = time.monotonic() - since
            statuses = self._statuses(gives_up=silent_s > self.config.run.hang_timeout_s)
            error = next((each.error for each in statuses if each.error), None)
            if not self._are_busy(statuses):
                break
            if statuses[0].gives_up:
                late = [rank for rank, each in enumerate(statuses) if each.is_busy]
                error = f"rank {late[-1]} has stopped writing"
                break
            before, moved = moved, sum(each.moved_bytes for each in statuses)
            if moved != before:
                since = time.monotonic()
            time.sleep(POLL_S)
        if error is not None:
            if self.info.rank == 0 and not statuses[0].gives_up and self._is_in_place():
                sweep(self.directory)  # ranks may have written after another one failed
            final = step_directory(self.directory, self._writing)
            failure = CheckpointError(str(final), f"cannot be written ({error})", NO_ROOM)
            failure.is_of_all_ranks = True
            raise failure

    def _copy(self) -> Part:
        return snapshot_rank(self.optimizer, self.fp8_state, self.info, self.device, self._copies)

    def _are_busy(self, statuses: list[_Status]) -> bool:
        """Return True if any rank is still writing.

        If another rank failed, rank 0 stops waiting for notes.
        """
        others = next((each.error for each in statuses[1:] if each.error), None)
        if others is not None and self.info.rank == 0 and statuses[0].is_busy:
            self._error = others
            self._abandoned.set()
        return any(each.is_busy for each in statuses)

    def _statuses(self, gives_up: bool = False) -> list[_Status]:
        is_busy = self._thread is not None and self._thread.is_alive()
        own = _Status(is_busy, self._error, moved_bytes(self._thread), gives_up)
        return [_Status(*each) for each in from_all_ranks(self.info, list(own))]

    def _is_in_place(self) -> bool:
        """Return True if the run's directory is still the one that the run started with.

        If that directory was renamed, another run may have created a new directory of the same
        name.
        """
        if self._run_fd is None:
            return True
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._run_fd), os.lstat(self._run))
        return False

    def _set_up(self) -> None:
        """Create the directory, and clean up after an earlier attempt of the run."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            sweep(self.directory)
            if self.after is not None:
                put_aside(self.directory, self.after)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise CheckpointError(str(self.directory), problem, NO_ROOM) from None

    def _check_in_place(self) -> None:
        """Raise FileNotFoundError if the run's directory was renamed or removed."""
        if not self._is_in_place():
            raise FileNotFoundError(errno.ENOENT, f"the run's directory {_GONE}")

    def _work(self, state: CheckpointState, part: Part) -> None:
        """Write this rank's share of a checkpoint in the thread. Errors are stored, not raised."""
        started = time.perf_counter()
        final = step_directory(self.directory, state.step)
        partial = final.with_name(f".{final.name}.{self._token}.partial")
        try:
            self._copies.wait()
            self._check_in_place()
            entries = write_part(partial, part)
            if self.info.rank > 0:
                leave_note(partial, self.info.rank, entries)
                return
            for rank in range(1, self.optimizer.num_shards):
                entries |= await_note(partial, rank, self._abandoned)
            entries[STATE] = _write_bytes(partial / STATE, state.to_json())
            self._check_in_place()
            complete(partial, final, self._manifest(state, entries))
        except Exception as error:  # an error of a thread would otherwise go unnoticed
            own = f"rank {self.info.rank} on {host_name()}: {_reason(error)}"
            self._error = self._error or own  # keeps the error of a rank that failed first
            if self.info.rank == 0:
                discard(partial)
                remedy = f"; {NO_ROOM}" if self._is_in_place() else ""
                problem = f"could not be written ({self._error}){remedy}"
                self._lines.append(f"checkpoint {final.name} {problem}")
        else:
            size = sum(entry.size for entry in entries.values())
            seconds = time.perf_counter() - started
            self._lines.append(f"checkpoint {final.name}: {size / 1e6:,.1f} MB in {seconds:.1f} s")
            self._tidy(final)

    def _tidy(self, final: Path) -> None:
        """Write the name of the new checkpoint to LATEST, and then remove old checkpoints."""
        try:
            write_file(final.with_name(LATEST), f"{final.name}\n".encode())
            if self.keep_last is not None:
                prune(self.directory, self.keep_last)
        except (OSError, UserError) as error:
            problem = (
                f"is complete, but updating LATEST or removing older checkpoints failed ({error})"
            )
            self._lines.append(f"checkpoint {final.name} {problem}")

    def _manifest(self, state: CheckpointState, entries: dict[str, FileEntry]) -> Manifest:
        return Manifest(
            step=state.step,
            samples=state.samples,
            vocabulary_sha256=state.vocabulary_sha256,
            version=package_version(),
            commit=self.commit,
            config=config_to_tables(self.config),
            files=dict(sorted(entries.items())),
            origin=dict(self.origin),
        )


def moved_bytes(thread: threading.Thread | None) -> int:
    """Return the number of bytes that a thread has read and written.

    Returns 0 if the thread has ended, or if the system does not count the bytes of each thread.
    """
    with suppress(OSError):
        if thread is not None and thread.is_alive():
            lines = Path(f"/proc/self/task/{thread.native_id}/io").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines[:2])
    return 0


def _reason(error: Exception) -> str:
    """Return the text of an error. For an OSError, omit the error number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
