"""How even is the ranks' work, for other lengths than Wikipedia's and for small batches?

    python lengths.py                   measure what records.jsonl lacks; about 3 minutes of a core
    python lengths.py --table within|policies|then
    python lengths.py --picture FILE.png

Imbalance is the largest cost of a rank over the mean. No assignment of whole sequences can beat the
bound max(longest sequence, mean of the ranks) over that mean, taken step by step.
"""

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np

from bert_tools.common.figures import new_figure, png
from mlperf_bert.data.balance import Balance, CostModel
from mlperf_bert.data.length_histogram import real_lengths
from mlperf_bert.data.sampler import make_sampler

RECORDS = Path(__file__).with_name("records.jsonl")
RANKS, RANKS_PER_NODE = 64, 8
SAMPLES, DRAWS, SEED = 200_000, 40, 1
LONGEST, USUAL_LONGEST = (128, 512, 2048), 512  # at the others the usual choice alone
LOCAL_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.0, 0.2, 0.5, 0.8)  # of a mean sequence's cost that are quadratic in its length
ACCUMULATED = 4
NEAR = 1.01  # of the bound

CHOSEN = "quantile, presort_global"
ALONE = "4 forwards, each for itself"  # as this program did before
# Sampler, policy, counts, forwards of an update: ranks wait for each other once an update.
WAYS = {
    "as drawn": ("uniform", "none", "equal", 1),
    "exchange in the node": ("quantile", "exchange_local", "equal", 1),
    "uniform, presort_global": ("uniform", "presort_global", "equal", 1),
    "quantile, presort_global": ("quantile", "presort_global", "equal", 1),
    "unequal counts": ("quantile", "presort_global", "unequal", 1),
    ALONE: ("quantile", "presort_global", "equal", ACCUMULATED),
    "4 forwards together": ("quantile", "presort_global", "equal", ACCUMULATED),
    "together, unequal counts": ("quantile", "presort_global", "unequal", ACCUMULATED),
}
COLOURS = {  # of what the picture has
    "as drawn": "#9a9a9a",
    CHOSEN: "#2f7d4f",
    "unequal counts": "#7fb3d8",
    "4 forwards together": "#d9722e",
}


def lengths_of(name, longest):
    """Lengths of a set, int [SAMPLES], from 1 to `longest`; drawn anew from the same seed."""
    draw = np.random.default_rng(SEED)
    if name == "Wikipedia":
        found = real_lengths(SAMPLES, longest, SEED)
    elif name == "uniform":
        found = draw.integers(1, longest + 1, SAMPLES)
    elif name == "log-normal":  # chats, abstracts
        found = np.exp(draw.normal(np.log(longest / 8), 0.8, SAMPLES))
    elif name == "questions and documents":
        questions = draw.normal(longest / 16, longest / 64, SAMPLES)
        documents = draw.normal(0.9 * longest, 0.1 * longest, SAMPLES)
        found = np.where(draw.random(SAMPLES) < 0.7, questions, documents)
    else:  # code: files of every size, truncated at the longest
        found = longest / 32 * (1 + draw.pareto(1.1, SAMPLES))
    return np.clip(np.rint(found), 1, longest).astype(np.uint16)


NAMES = ("Wikipedia", "uniform", "log-normal", "questions and documents", "code")


def cost_model(lengths, share):
    """Costs of which a share is quadratic, in the mean of the set."""
    lengths = lengths.astype(float)
    quadratic = 0.0 if not share else share / (1 - share) * lengths.mean() / (lengths**2).mean()
    return CostModel(linear=1.0, quadratic=quadratic)


def measured(name, longest, local, share, way):
    """Mean imbalance, mean bound and how often the longest sequence alone is the bound."""
    sampler_name, policy, counts, forwards = WAYS[way]
    lengths = lengths_of(name, longest)
    cost = cost_model(lengths, share)
    size = local * forwards
    sampler = make_sampler(
        sampler_name,
        order_by_length=np.argsort(lengths, kind="stable"),
        length_histogram=np.bincount(lengths, minlength=longest + 1),
        global_batch_size=RANKS * size,
        seed=SEED,
    )
    balance = Balance(policy=policy, ranks_per_node=RANKS_PER_NODE, counts=counts)
    found = []
    for step in np.unique(np.linspace(1, SAMPLES // (RANKS * size), DRAWS).astype(int)):
        costs = cost(lengths[sampler.global_batch(int(step))])
        ranks = RANKS * forwards if way == ALONE else RANKS
        assigned = balance(costs.reshape(ranks, -1, local))
        of_rank = assigned.counts.reshape(RANKS, forwards).sum(axis=1)
        starts = np.cumsum(of_rank) - of_rank
        loads = np.add.reduceat(costs[assigned.places], starts)
        found.append((loads.max() / loads.mean(), max(costs.max() / loads.mean(), 1.0)))
    imbalance, bound = np.array(found).T
    return {
        **{"lengths": name, "longest": longest, "local_batch": local, "quadratic": share},
        **{"way": way, "draws": len(found), "imbalance": float(imbalance.mean())},
        "error": rounded(imbalance.std(ddof=1) / len(found) ** 0.5),
        "over_bound": rounded((imbalance / bound).mean()),
        "bound": rounded(bound.mean()),
        "bound_by_longest": rounded((bound > 1).mean()),
    }


def rounded(value):
    """To six digits behind the point."""
    return round(float(value), 6)


def records():
    """All of them, by case."""
    found = map(json.loads, RECORDS.read_text().splitlines()) if RECORDS.exists() else ()
    return {
        tuple(r[k] for k in ("lengths", "longest", "local_batch", "quadratic", "way")): r
        for r in found
    }


def measure_all():
    """Measure every case that has no record."""
    done = records()
    cases = product(NAMES, LONGEST, LOCAL_BATCHES, SHARES, WAYS)
    wanted = [case for case in cases if case[1] == USUAL_LONGEST or case[-1] == CHOSEN]
    todo = [case for case in wanted if case not in done]
    with open(RECORDS, "a") as file:
        for number, case in enumerate(todo, 1):
            print(json.dumps(measured(*case)), file=file, flush=True)
            print(f"\r{number:,} of {len(todo):,}", end="", flush=True)
    print()


def first_within(found, name, longest, share, way):
    """The smallest local batch from which on the way stays near the bound, in words."""
    ratios = [found[name, longest, local, share, way]["over_bound"] for local in LOCAL_BATCHES]
    far = [local for local, ratio in zip(LOCAL_BATCHES, ratios, strict=True) if ratio > NEAR]
    if not far:
        return "1"
    after = [local for local in LOCAL_BATCHES if local > far[-1]]
    return str(after[0]) if after else f"more than {far[-1]}"


def within_table(found):
    """From which local batch on is the usual choice within 1 % of the bound?"""
    yield ["lengths", "longest", *(f"{share:.0%} quadratic" for share in SHARES)]
    for name, longest in product(NAMES, LONGEST):
        cells = [first_within(found, name, longest, share, CHOSEN) for share in SHARES]
        yield [name, f"{longest:,}", *cells]


def policies_table(found, longest=USUAL_LONGEST, local=8, share=0.2):
    """Every way beside the bound, at one size."""
    yield ["lengths", *WAYS, "bound"]
    for name in NAMES:
        row = [found[name, longest, local, share, way] for way in WAYS]
        cells = [f"{each['imbalance']:.4f} ± {each['error']:.4f}" for each in row]
        yield [name, *cells, f"{found[name, longest, local, share, CHOSEN]['bound']:.4f}"]


def then_table(found, longest=USUAL_LONGEST, share=0.5):
    """What helps where the usual choice is too far: small batches, dear attention."""
    ways = (CHOSEN, "unequal counts", ALONE, "4 forwards together", "together, unequal counts")
    yield ["lengths", "local batch", *ways[:2], "bound", *ways[2:], "bound of 4 forwards"]
    for name, local in product(NAMES, (1, 2, 4, 8)):
        row = {way: found[name, longest, local, share, way] for way in ways}
        cells = [f"{each['imbalance']:.3f}" for each in row.values()]
        bounds = [f"{row[way]['bound']:.3f}" for way in (CHOSEN, ALONE)]
        yield [name, str(local), *cells[:2], bounds[0], *cells[2:], bounds[1]]


TABLES = {"within": within_table, "policies": policies_table, "then": then_table}


def table(name):
    """Markdown."""
    head, *rows = TABLES[name](records())
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def draw(path, longest=USUAL_LONGEST):
    """Imbalance over local batch: a panel for each distribution, at two shares of attention."""
    found = records()
    figure = new_figure(11, 5.2)
    panels = figure.subplots(2, len(NAMES), sharex=True, sharey=True)
    for (row, share), (column, name) in product(enumerate((0.2, 0.8)), enumerate(NAMES)):
        axes = panels[row, column]
        for way, colour in COLOURS.items():
            values = [found[name, longest, b, share, way]["imbalance"] - 1 for b in LOCAL_BATCHES]
            axes.plot(
                LOCAL_BATCHES, np.maximum(values, 1e-4), "o-", ms=2.5, color=colour, label=way
            )
        bound = [found[name, longest, b, share, CHOSEN]["bound"] - 1 for b in LOCAL_BATCHES]
        axes.plot(LOCAL_BATCHES, np.maximum(bound, 1e-4), "k:", label="bound")
        axes.set(xscale="log", yscale="log", ylim=(1e-4, 10))
        axes.set_xticks(LOCAL_BATCHES, map(str, LOCAL_BATCHES))
        axes.minorticks_off()
        if row == 0:
            axes.set_title(name, fontsize=9)
        if column == 0:
            axes.set_ylabel(f"imbalance - 1, {share:.0%} quadratic")
    panels[1, 2].set_xlabel("sequences of a rank")
    panels[0, 0].legend(frameon=False, fontsize=6)
    Path(path).write_bytes(png(figure))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            measure_all()
        case ["--table", name]:
            print(table(name))
        case ["--picture", path]:
            draw(path)
        case _:
            sys.exit(__doc__)
