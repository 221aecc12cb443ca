"""Tables and the picture of the study, from `records.jsonl`.

python tables.py samples|settings|fit     Markdown
python tables.py picture FILE.png         samples over batch
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from study import BUDGETS, OPTIMIZERS, RECORDS, best_trial

NAMES = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}
COLOURS = {"adamw": "#2f6f9f", "lamb": "#8a63b0", "muon": "#d9722e"}
DRAWS = 10_000
LARGEST = 16_384  # what the fits are asked for


def main(what, *words):
    """Print a table, or draw the picture."""
    records = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        records[record["name"]] = record
    if what == "picture":
        draw(records, Path(words[0]))
        return
    makers = {"samples": samples_table, "settings": settings_table, "fit": fit_table}
    print("\n".join(makers[what](records)))


def repetitions(records, optimizer, batch, kind="seed"):
    """Records of the fresh seeds, by seed."""
    found = [
        each
        for each in records.values()
        if (each["optimizer"], each["batch"], each["kind"]) == (optimizer, batch, kind)
    ]
    return sorted(found, key=lambda each: each["seed"])


def samples_of(repeated):
    """Samples to the target of each repetition; of one that missed it, its whole budget."""
    return np.array([each["reached"] or BUDGETS[each["batch"]] for each in repeated], dtype=float)


def all_reached(repeated):
    """True if there are repetitions and each reached the target."""
    return bool(repeated) and all(each["reached"] for each in repeated)


def means(values, generator):
    """Means of draws with replacement."""
    return generator.choice(values, (DRAWS, len(values))).mean(axis=1)


def interval(draws):
    """95 % of the draws."""
    return np.quantile(draws, [0.025, 0.975])


def batches_of(records, kind="seed"):
    """Batches of which every optimizer has repetitions, or none reached the target in tuning."""
    return [
        batch
        for batch in BUDGETS
        if any(repetitions(records, each, batch, kind) for each in OPTIMIZERS)
    ]


def head(*names):
    """The two first lines of a table."""
    yield f"| {' | '.join(names)} |"
    yield len(names) * "|---" + "|"


def samples_table(records):
    """Samples to the target with intervals, beside AdamW's; and with clipping by buckets."""
    generator = np.random.default_rng(1)
    names = "reached", "samples to the target (95 %)", "updates", "over AdamW's (95 %)"
    yield from head("global batch", "optimizer", *names)
    for batch in batches_of(records):
        for kind in ("seed", "buckets"):
            for optimizer in OPTIMIZERS:
                repeated = repetitions(records, optimizer, batch, kind)
                if repeated:
                    yield row_of(records, repeated, generator)


def row_of(records, repeated, generator):
    """One row of `samples_table`."""
    optimizer, batch, kind = (repeated[0][key] for key in ("optimizer", "batch", "kind"))
    values, name = samples_of(repeated), NAMES[optimizer]
    base, text = "adamw", ""
    if kind == "buckets":
        name, base = f"{name}, clipped by buckets", optimizer
    reached = f"{len(values)} of {len(repeated)}"
    if not len(values):
        return f"| {batch:,} | {name} | {reached} | more than {BUDGETS[batch]:,} | | |"
    draws = means(values, generator)
    low, high = interval(draws)
    others = samples_of(repetitions(records, base, batch))
    if len(others) and (optimizer, kind) != ("adamw", "seed"):
        ratios = draws / means(others, generator)
        text = "{:.2f} ({:.2f} to {:.2f})".format(values.mean() / others.mean(), *interval(ratios))
        text += ", of itself" if kind == "buckets" else ""
    return (
        f"| {batch:,} | {name} | {reached} | {values.mean():,.0f} ({low:,.0f} to {high:,.0f}) | "
        f"{values.mean() / batch:,.0f} | {text} |"
    )


def settings_table(records):
    """Trials of every arm, and the settings of the best."""
    names = "trials: all, reached, failed", "rate", "warm-up", "beta_2", "decay"
    yield from head("global batch", "optimizer", *names)
    for batch in BUDGETS:
        for optimizer in OPTIMIZERS:
            trials = repetitions(records, optimizer, batch, "trial")
            if not trials:
                continue
            best = best_trial(records, optimizer, batch)
            reached = sum(each["reached"] is not None for each in trials)
            failed = sum(each["ended"] == "failed" for each in trials)
            row = f"| {batch:,} | {NAMES[optimizer]} | {len(trials)}, {reached}, {failed} | "
            if best is None:
                yield row + "| | | |"
                continue
            found = best["settings"]
            rate, warm_up, beta_2, decay = (
                found[key]
                for key in (
                    "optim.learning_rate",
                    "schedule.warmup_steps",
                    "optim.beta_2",
                    "optim.weight_decay",
                )
            )
            yield f"{row}{rate:g} | {warm_up} | {beta_2:g} | {decay:g} |"


def fitted(batches, samples):
    """Least samples and critical batch of samples = least (1 + batch / critical)."""

    def residuals(logs):
        least, critical = np.exp(logs)
        return np.log(least * (1 + batches / critical)) - np.log(samples)

    return np.exp(least_squares(residuals, np.log([samples.min(), batches.mean()])).x)


def fits(records, optimizer):
    """The fit, and those of samples drawn again; None with fewer than three batches."""
    generator = np.random.default_rng(2)
    values = {
        batch: samples_of(repetitions(records, optimizer, batch)) for batch in batches_of(records)
    }
    values = {batch: each for batch, each in values.items() if len(each)}
    if len(values) < 3:
        return None
    batches = np.array(list(values), dtype=float)
    drawn = np.stack([means(each, generator)[:1000] for each in values.values()], axis=1)
    centre = fitted(batches, np.array([each.mean() for each in values.values()]))
    return centre, np.array([fitted(batches, each) for each in drawn])


def fit_table(records):
    """Fits of the critical batch, the noise scale measured in the same runs, and extrapolation."""
    noise = "noise scale, plain and preconditioned"
    wide = f"samples at {LARGEST:,} (95 %)"
    yield from head("optimizer", "least samples", "critical batch (95 %)", noise, wide)
    for optimizer in OPTIMIZERS:
        found = fits(records, optimizer)
        if found is None:
            continue
        (least, critical), drawn = found
        largest = drawn[:, 0] * (1 + LARGEST / drawn[:, 1])
        noise = [
            f"{np.median(each):,.0f}" for each in zip(*noises(records, optimizer), strict=True)
        ]
        yield (
            f"| {NAMES[optimizer]} | {least:,.0f} | {critical:,.0f} "
            "({:,.0f} to {:,.0f}) | ".format(*interval(drawn[:, 1]))
            + f"{', '.join(noise)} | {least * (1 + LARGEST / critical):,.0f} "
            "({:,.0f} to {:,.0f}) |".format(*interval(largest))
        )


def noises(records, optimizer):
    """Last noise scales, plain and preconditioned, of every repetition at every batch."""
    for batch in batches_of(records):
        for each in repetitions(records, optimizer, batch):
            if each["noise"] and all(each["noise"].values()):
                yield each["noise"]["noise_scale_plain"], each["noise"]["noise_scale"]


def draw(records, path):
    """Samples to the target over the global batch, every run a dot, with the fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for optimizer in OPTIMIZERS:
        points = [
            (batch, value)
            for batch in batches_of(records)
            for value in samples_of(repetitions(records, optimizer, batch))
        ]
        if not points:
            continue
        colour = COLOURS[optimizer]
        axes.plot(*zip(*points, strict=True), "o", ms=4, alpha=0.6, color=colour)
        found = fits(records, optimizer)
        if found is None:
            axes.plot([], [], color=colour, label=NAMES[optimizer])
            continue
        (least, critical), _ = found
        batches = np.geomspace(min(BUDGETS), LARGEST)
        label = f"{NAMES[optimizer]}: critical batch {critical:,.0f}"
        axes.plot(batches, least * (1 + batches / critical), color=colour, label=label)
    axes.axvspan(max(batches_of(records)), LARGEST, color="#eeeeee", label="beyond the data")
    axes.set(xscale="log", yscale="log", xlabel="global batch, sequences")
    axes.set_ylabel("samples to 1.5 times the context-free guess")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
