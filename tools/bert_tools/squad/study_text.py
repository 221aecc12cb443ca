"""The published study in words: its table, what follows from it, what is confounded. No torch."""

from collections.abc import Iterator, Sequence

from bert_tools.common.tables import markdown
from bert_tools.squad.study import TITLE, StudyRow, published_study

_STUDY_BATCH = 16  # the baseline's, the natural initial batch


def study_in_words() -> list[str]:
    """Lines: figures with differences to the baseline, what they say of each other, and why."""
    rows = published_study()
    return [
        f"The study ({TITLE}):",
        "",
        *markdown(_HEADER, [_published(row, rows[0]) for row in rows]),
        "",
        "What its figures say of each other:",
        "",
        *markdown(_DERIVED_HEADER, [_derived(row) for row in rows]),
        "",
        *confounds(rows),
    ]


_HEADER = (
    *("experiment", "runtime, s", "samples/s", "validation loss", "utilisation, %"),
    *("stat. efficiency", "goodput", "updates"),
)
_DERIVED_HEADER = (
    *("experiment", "precision", "global batch", "samples (samples/s x runtime)"),
    *("samples an update", "samples/s x efficiency", "least efficiency by definition"),
)


def _published(row: StudyRow, first: StudyRow) -> list[str]:
    def with_difference(key: str, places: int) -> str:
        value, base = float(getattr(row, key)), float(getattr(first, key))
        shown = f"{value:,.{places}f}" if value >= 1e-3 else f"{value:.4g}"
        return shown if row is first else f"{shown} ({100 * (value / base - 1):+.2f} %)"

    return [
        row.experiment,
        with_difference("runtime_s", 2),
        with_difference("samples_per_s", 2),
        with_difference("validation_loss", 4),
        with_difference("utilisation_percent", 2),
        with_difference("efficiency", 5),
        with_difference("goodput", 4),
        with_difference("updates", 0),
    ]


def _derived(row: StudyRow) -> list[str]:
    return [
        row.experiment,
        row.precision,
        f"{row.global_batch}",
        f"{row.samples:,.0f}",
        f"{row.samples_per_update:.1f}",
        f"{row.product:.5f}",
        f"{row.least_efficiency:.4f}",
    ]


def confounds(rows: Sequence[StudyRow]) -> Iterator[str]:
    """What differs between rows beside the engine, and what the figures cannot be."""
    per_update = " / ".join(f"{row.samples_per_update:.1f}" for row in rows)
    samples = " / ".join(f"{row.samples / 1e3:,.0f}k" for row in rows)
    least = " / ".join(f"{row.least_efficiency:.3g}" for row in rows)
    wrong = " / ".join(f"{row.least_of_product(_STUDY_BATCH):.2g}" for row in rows)
    needed = max(1 / (row.global_batch * row.efficiency) for row in rows)
    others, baseline = rows[1:], f"{rows[0].samples_per_update:.1f}"
    batches = " and ".join(f"{row.global_batch}" for row in others)
    yield (
        f"- Precision: {rows[0].precision} in the baseline, {others[0].precision} in the others: "
        "on these GPUs that alone makes training faster."
    )
    yield (
        f"- Global batch: {rows[0].global_batch} against {batches} samples, at whatever learning "
        "rate: validation loss and efficiency change with it, whatever the engine."
    )
    yield f"- Samples: {samples}: runtimes are of different amounts of work."
    yield (
        f"- Samples an update: {per_update}. In the last two rows that is 16 a device: data "
        "parallelism's batch. Hugging Face's Trainer has no pipeline stages of DeepSpeed "
        "(huggingface/transformers#37129), so these rows were most likely data parallelism too; "
        f"{baseline} in the baseline fit no batch of {rows[0].global_batch}."
    )
    yield (
        f"- Efficiency: (phi + M0) / (phi + M) is at least M0 / M, so at least {least} for any "
        "initial batch of a sample or more. All published ones are below: none follows from the "
        "definition."
    )
    yield (
        "- A conjecture why: M taken times M0 in the place of divided by it, as one revision of "
        f"AdaptDL's goodput.py has it. With M0 = {_STUDY_BATCH} that gives at least {wrong}: the "
        f"baseline fits, the others do not (they would need M0 of {needed:,.0f} or more). So it "
        "explains small efficiencies, not these figures."
    )
    yield (
        "- Utilisation is NVML's: low where kernels wait for something. It is no property of "
        "pipelines: their bubbles are (s - 1) / (m + s - 1) of s stages and m microbatches."
    )
