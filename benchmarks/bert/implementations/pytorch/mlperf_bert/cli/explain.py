"""A config in words: `mlperf_bert config --explain FILE`. What it derives, and what to expect."""

import textwrap
from collections.abc import Iterator
from math import ceil

from mlperf_bert.config.run_config import RunConfig, is_bert_large
from mlperf_bert.data.sampler import default_quantiles
from mlperf_bert.evaluation.convergence import ExpectedSamples, expected_samples

_LABEL_WIDTH, _WIDTH = 16, 100
_MOST_POINTS = 40  # evaluation points that are listed
_RCP_KIND = {
    "point": "the reference convergence point of this batch",
    "between": "between reference convergence points",
    "smallest": "the smallest reference convergence point, for want of one of this batch",
}


def in_words(config: RunConfig) -> str:
    """Lines of text; nothing in them that the config does not hold or imply."""
    lines = []
    for label, text in _facts(config):
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"{label:<{_LABEL_WIDTH}}",
            subsequent_indent=" " * _LABEL_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def evaluation_steps(config: RunConfig) -> list[int]:
    """Steps after which a run that never reaches its target evaluates, in order.

    Point k lies at ceil(k * interval / global batch), as in the rules, and the last step is one.
    """
    batch, last = config.parallel.global_batch_size, config.max_steps
    steps = range(1, last + 1)
    return [step for step in steps if step == last or config.evaluation_is_due(step * batch)]


def _facts(config: RunConfig) -> Iterator[tuple[str, str]]:
    parallel, optim = config.parallel, config.optim
    batch, steps = parallel.global_batch_size, config.max_steps
    yield "division", f"{config.mlperf.division}, {optim.name}, model in {config.model.precision}"
    nodes, ranks = _count(parallel.nodes, "node"), _count(parallel.ranks_per_node, "rank")
    yield "world size", f"{parallel.world_size:,}: {nodes} of {ranks}"
    yield (
        "global batch",
        f"{_count(batch, 'sequence')}: {parallel.world_size:,} x {parallel.local_batch_size} "
        f"(local batch) x {parallel.grad_accum_steps} (accumulation)",
    )
    if config.data.sampler == "quantile":
        quantiles = config.data.quantiles
        number = default_quantiles(batch) if quantiles == "auto" else quantiles
        yield "sampler", f"quantile: {batch // number} from each of {_count(number, 'quantile')}"
    else:
        yield "sampler", config.data.sampler
    yield "learning rate", _schedule(config)
    yield (
        "stop",
        f"at {config.eval.target_accuracy} masked-LM accuracy, or after {_count(steps, 'step')} "
        f"({steps * batch:,} samples)",
    )
    points = evaluation_steps(config)
    rule = " (MLPerf's rule)" if config.eval.interval_samples == "mlperf" else ""
    listed = ", ".join(map(str, points[:_MOST_POINTS]))
    more = f" ... {points[-1]}" if len(points) > _MOST_POINTS else ""
    yield (
        "evaluation",
        f"every {config.eval_interval_samples:,} samples{rule} and where the run stops",
    )
    yield "", f"{len(points)} times, at steps {listed}{more}"
    if _has_reference(config):
        yield "to the target", _to_target(config, expected_samples(batch))


def _schedule(config: RunConfig) -> str:
    schedule, rate = config.schedule, config.optim.learning_rate
    parts = []
    if schedule.warmup_steps:
        ends = max(schedule.warmup_steps + schedule.start_warmup_step, 0)
        parts.append(
            f"warm-up of {_count(schedule.warmup_steps, 'step')} that starts at step "
            f"{schedule.start_warmup_step} and ends at {ends}"
        )
    else:
        parts.append("no warm-up")
    power = "linear" if schedule.power == 1 else f"power {schedule.power:g}"
    parts.append(
        f"{power} decay to {schedule.end_learning_rate:g} at step {schedule.decay_steps:,} "
        f"({schedule.form})"
    )
    return f"{rate:g}; " + "; ".join(parts)


def _has_reference(config: RunConfig) -> bool:
    """Whether the reference convergence points speak of such a run."""
    is_closed = config.mlperf.division == "closed"
    return is_bert_large(config.model) and is_closed and config.optim.name == "lamb"


def _to_target(config: RunConfig, expected: ExpectedSamples | None) -> str:
    if expected is None:
        return "not known: no reference convergence point reaches this batch"
    batch = config.parallel.global_batch_size
    mean_steps, least_steps = ceil(expected.mean / batch), ceil(expected.minimum / batch)
    text = (
        f"{expected.mean:,.0f} samples ({mean_steps:,} steps) expected, "
        f"{_RCP_KIND[expected.kind]}; ten runs pass with a mean of {expected.minimum:,.0f} "
        f"({least_steps:,} steps) at least"
    )
    if mean_steps > config.max_steps:
        text += "; the run stops before that: raise schedule.decay_steps"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
