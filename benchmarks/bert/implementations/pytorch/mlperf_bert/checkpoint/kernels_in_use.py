"""The kernels that a run computes with: equal on all ranks, and told if a resumed run has others.

`model.attention` and `model.kernels` may be "auto", which `model/choices.py` replaces by what the
machine can run. Kernels round differently, and `flash` also drops other elements. A run repeats bit
for bit only if all its ranks and all its attempts use the same ones.
"""

from collections.abc import Iterator, Sequence

from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining


def agree_on_kernels(info: RankInfo, model: BertForPretraining) -> None:
    """Check that all ranks have built their model with the same attention policy and blocks.

    Every rank must call it at the same time. Raises ConfigError on all of them if one differs.
    """
    own = [model.attention.name, model.attention.note, model.kernels]
    policies, notes, blocks = zip(*from_all_ranks(info, own), strict=True)

    def check() -> None:
        _check_same("model.attention", policies, notes)
        _check_same("model.kernels", blocks, blocks)

    on_every_rank(info, check)


def _check_same(setting: str, names: Sequence[str], notes: Sequence[str]) -> None:
    """Raise ConfigError unless all names are equal.

    Args:
        setting: the setting that was "auto".
        names: what it became on each rank.
        notes: for each rank the words to show; they may say why it cannot run what others can.
    """
    unique = list(dict.fromkeys(names))
    if len(unique) == 1:
        return
    places = [f"{notes[names.index(name)]!r} on rank {names.index(name)}" for name in unique]
    raise ConfigError(
        setting,
        f"is not the same on all ranks: {', '.join(places)}",
        f"set {setting} to one that all ranks can run, or install the same software on all nodes",
    )


def changed_kernels(saved: CheckpointState | None, now: CheckpointState) -> Iterator[str]:
    """Yield a remark for each kind of kernels that differs from those of a resumed checkpoint.

    Args:
        saved: the state of the checkpoint, or None if the run begins anew. A checkpoint of before
            2026-11-28 does not say what was used, so there is no remark.
        now: the identity of the run that starts.
    """
    if saved is None:
        return
    used = (
        ("model.attention", saved.attention, now.attention),
        ("model.kernels", saved.kernels, now.kernels),
    )
    for setting, before, after in used:
        if before is not None and before != after:
            yield (
                f"{setting} was {before!r} when this checkpoint was written and is {after!r} now: "
                "losses will differ by rounding, and not repeat bit for bit"
            )
