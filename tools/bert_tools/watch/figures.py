"""The figures of a run's newest record, in columns."""

from rich.text import Text

from bert_tools.watch.history import Record
from bert_tools.watch.look import Look
from bert_tools.watch.words import count, duration, figure, size

TWO_COLUMNS = 70
_LABEL, _COLUMN = 12, 39


def figures(look: Look, width: int) -> list[Text]:
    """One line a pair, or half as many where two columns fit."""
    last = look.history.last
    assert last is not None
    left, right = _speed(look, last), _quality(look, last)
    if width >= TWO_COLUMNS:
        return [Text.assemble(*_pair(*a), *_pair(*b)) for a, b in zip(left, right, strict=True)]
    return [Text.assemble(*_pair(*each)) for each in (*right, *left)]


def _pair(label: str, value: str) -> tuple[tuple[str, str], str]:
    return (f"{label:<{_LABEL}}", "dim"), f"{value:<{_COLUMN - _LABEL}} "


def _speed(look: Look, last: Record) -> list[tuple[str, str]]:
    usual = look.history.usual("samples_per_s")
    rate = "-" if last.get("samples_per_s") is None else count(last["samples_per_s"])
    tokens = "-" if last.get("tokens_per_s") is None else count(last["tokens_per_s"])
    memory = size(last.get("memory_bytes"))
    return [
        ("samples", f"{count(last['samples'])} in {duration(look.history.trained_s)}"),
        ("samples/s", rate if usual is None else f"{rate} (median {count(usual)})"),
        ("tokens/s", tokens),
        ("step", f"{figure(last.get('step_ms'))} ms, wait {figure(last.get('wait_ms'), 2)} ms"),
        ("imbalance", _imbalance(last)),
        ("memory", f"{memory} on rank 0" if memory != "-" else memory),
    ]


def _imbalance(last: Record) -> str:
    words = f"{figure(last.get('imbalance_tokens'))} tokens"
    idle = last.get("idle_fraction")
    return words if idle is None else f"{words}, idle {min(1.0, max(0.0, idle)):.1%}"


def _quality(look: Look, last: Record) -> list[tuple[str, str]]:
    history, target = look.history, look.config and look.config.eval.target_accuracy
    loss = "no number" if last["loss"] is None else figure(last["loss"], 5)
    accuracy = "no evaluation yet"
    if history.evaluations:
        newest, best = history.evaluations[-1].accuracy, history.best_accuracy
        accuracy = f"{newest:.4f}" + ("" if best == newest else f", best {best:.4f}")
        accuracy += f" of {target:g}" if target else ""
    ratio = last.get("slowest_over_median")
    return [
        ("loss", loss),
        ("accuracy", accuracy),
        ("learn. rate", figure(last.get("learning_rate"), 3)),
        ("grad. norm", f"{figure(last.get('grad_norm'))}{_clipped(last)}"),
        ("skipped", f"{count(last['skipped_steps'])} now, {count(history.skipped_steps)} in all"),
        ("slow rank", "not measured" if ratio is None else f"{ratio:.2f} x the median"),
    ]


def _clipped(last: Record) -> str:
    share = last.get("clipped_fraction")
    return "" if share is None else f", clipped {min(1.0, max(0.0, share)):.0%}"
