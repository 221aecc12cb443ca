"""The part of a report's page that says which batch would be best now."""

import math
from collections.abc import Iterator, Sequence

from bert_tools.report.facts import RunFacts
from bert_tools.report.goodput import BatchFacts, batch_facts
from bert_tools.report.markup import Markup, element
from bert_tools.report.numbers import significant
from bert_tools.report.sections import section
from bert_tools.report.svg import run_class
from bert_tools.report.throughput_model import Setup
from mlperf_bert.optim.noise_scale import learning_rate_gain

_FACTORS = (1, 2, 4, 8, 16, 32)
_HEADS = (
    "batch, sequences",
    "efficiency",
    "samples for the same progress",
    "updates for it",
    "learning rate, square-root rule",
    "learning rate, AdaScale (SGD)",
)
_TIMES = "\N{MULTIPLICATION SIGN}"


def goodput_section(runs: Sequence[RunFacts], cards: Sequence[Markup]) -> Markup | None:
    """None where no run knows its noise scale. `cards`: the charts over the batch."""
    found = batch_facts(runs)
    if not found:
        return None
    several = len(runs) > 1
    parts = [part for each in found for part in _of_run(each, several=several)]
    return section(
        "Which batch would be best now",
        *parts,
        element("div", *cards, class_="cards"),
        about="By the noise scale phi: a sample in a batch of M is worth (phi + M0) / (phi + M) of "
        "one in the run's own batch M0. That holds for now, as phi grows while a run learns.",
    )


def _of_run(each: BatchFacts, *, several: bool) -> Iterator[Markup]:
    if several:
        yield element(
            "p",
            element("span", class_="key"),
            element("span", each.label, class_="name"),
            class_=run_class(each.run),
        )
    for words in in_words(each):
        yield element("p", words)
    heads = [element("th", head, scope="col") for head in _HEADS]
    rows = [_row(each, factor) for factor in _FACTORS]
    table = element(
        "table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="numbers"
    )
    yield element("div", table, class_="scroll", tabindex="0")


def in_words(each: BatchFacts) -> list[str]:
    """What follows from the noise scale, in sentences."""
    plain = "" if each.plain is None else f" ({significant(each.plain, 3)} of plain gradients)"
    words = [
        f"At step {each.step:,} the noise scale is {significant(each.noise_scale, 3)} "
        f"sequences{plain}; the batch has {each.batch:,}.",
        f"Up to {round(each.batch_of(0.9)):,} sequences a sample keeps 90 % of its worth, up to "
        f"{round(each.batch_of(0.5)):,} half of it.",
    ]
    if each.best is None or each.model is None:
        words.append(
            "One setup was timed, which does not say how long other batches take: report this run "
            "together with short ones of another local_batch_size to see the best on these ranks."
        )
        return words
    words.append(_of_best(each, each.best, each.model.error))
    return words


def _of_best(each: BatchFacts, best: Setup, error: float) -> str:
    """`error`: of the fitted times, in logarithms."""
    gain = each.goodput_of(best) / each.goodput_of(each.setup)
    words = (
        f"On these {each.setup.ranks} ranks the best batch is {best.global_batch_size:,} "
        f"(local_batch_size {best.local_batch_size}, grad_accum_steps {best.grad_accum_steps}): "
        f"{significant(gain, 3)} {_TIMES} the goodput of now, by times fitted within "
        f"{100 * error:.1f} %."
    )
    if best != each.setup and math.log(gain) <= error:
        words += " That is no more than the fit is off by: the batch of now may be as good."
    if best.local_batch_size > each.largest_forward:
        words += " No run shown had so large a forward: see whether it fits in memory."
    return words


def _row(each: BatchFacts, factor: int) -> Markup:
    batch = each.batch * factor
    worth = each.efficiency_at(batch)
    root = learning_rate_gain(each.noise_scale, each.batch, batch, "square_root")
    # AdaScale is of SGD, which sees gradients as they are.
    adascale = None
    if each.plain is not None:
        adascale = learning_rate_gain(each.plain, each.batch, batch, "adascale")
    factors = (1 / worth, 1 / worth / factor, root, adascale)
    cells = (
        f"{batch:,}",
        f"{100 * worth:.1f} %",
        *("unknown" if value is None else f"{significant(value, 3)} {_TIMES}" for value in factors),
    )
    return element("tr", *(element("td", cell) for cell in cells))
