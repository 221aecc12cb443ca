"""Tables and the picture of the study, from `records.jsonl`.

python tables.py samples|nearer|paired|settings|fit|noise     Markdown
python tables.py picture FILE.png                             samples over batch

`nearer` has samples to 1.25 times the guess, passed by runs on their way to 1.5; fits and picture
are of these too, as more arms reached it. `paired` compares arms seed by seed, where none missed.
The trainings of a larger model are in the records and in no table: of its two arms one, with two
seeds, never reached a target.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import ttest_1samp

from study import (
    BUDGETS,
    NEARER_BATCH,
    NEARER_OVER_GUESS,
    OPTIMIZERS,
    OVER_GUESS,
    RECORDS,
    best_trial,
    crossing,
)

NAMES = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}
COLOURS = {"adamw": "#2f6f9f", "lamb": "#8a63b0", "muon": "#d9722e"}
DRAWS = 10_000
LARGEST = 16_384  # what the fits are asked for
NEARER = NEARER_OVER_GUESS / OVER_GUESS  # of the target


def main(what, *words):
    """Print a table, or draw the picture."""
    records = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        records[record["name"]] = record
    if what == "picture":
        draw(records, Path(words[0]))
        return
    makers = {
        "samples": lambda of: samples_table(of, 1.0),
        "nearer": lambda of: samples_table(of, NEARER),
        "paired": paired_table,
        "settings": settings_table,
        "fit": fit_table,
        "noise": noise_table,
    }
    print("\n".join(makers[what](records)))


def of_arm(records, optimizer, batch, kind):
    """Records of one kind, by seed and number."""
    found = [
        each
        for each in records.values()
        if (each["optimizer"], each["batch"], each["kind"]) == (optimizer, batch, kind)
    ]
    return sorted(found, key=lambda each: (each["seed"], each["number"]))


def tuned(records):
    """Batches of which an optimizer was trained with fresh seeds: their trials have ended."""
    return [b for b in BUDGETS if any(of_arm(records, each, b, "seed") for each in OPTIMIZERS)]


def crossings(repeated, share):
    """Samples of each repetition to a share of the target; None where it missed that.

    Trainings that ended at the nearer target have that as theirs.
    """
    goals = {each["name"]: each["target"] for each in repeated if has_nearer(each)}
    return [
        crossing(each["curve"], goals.get(each["name"], share * each["target"]))
        for each in repeated
    ]


def has_nearer(record):
    """True if a training ended at the nearer target."""
    return record["batch"] >= NEARER_BATCH


def samples_of(repeated, share):
    """The same; of one that missed it, all that it was trained on."""
    found = zip(crossings(repeated, share), repeated, strict=True)
    return np.array([reached or each["samples"] for reached, each in found], dtype=float)


def has_missed(repeated, share):
    """True if a repetition missed that share of the target."""
    return None in crossings(repeated, share)


def drawn_means(*arms):
    """Means of each arm over seeds drawn with replacement, the same seeds for all arms."""
    draws = np.random.default_rng(1).integers(0, len(arms[0]), (DRAWS, len(arms[0])))
    return [values[draws].mean(axis=1) for values in arms]


def ranged(value, draws, form):
    """A value with the middle 95 % of its draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def head(*names):
    """The two first lines of a table."""
    yield f"| {' | '.join(names)} |"
    yield len(names) * "|---" + "|"


def compared(records, share):
    """Batch, name, records and those to compare with: AdamW's or, clipped by buckets, its own."""
    for batch in tuned(records):
        for kind, words in (("seed", ""), ("buckets", ", clipped by buckets")):
            for optimizer in OPTIMIZERS:
                repeated = of_arm(records, optimizer, batch, kind)
                if repeated and (share < 1 or not has_nearer(repeated[0])):
                    other = "adamw" if kind == "seed" else optimizer
                    name = f"{NAMES[optimizer]}{words}"
                    yield batch, name, repeated, of_arm(records, other, batch, "seed")


def samples_table(records, share):
    """Samples to a share of the target, and over those of the arm to compare with."""
    samples = "samples to the target (95 %, bootstrap)"
    ratio = "over AdamW's (95 %, bootstrap)"
    yield from head("global batch", "optimizer", "reached", samples, "updates", ratio)
    for batch, name, repeated, others in compared(records, share):
        yield f"| {batch:,} | {name} | {cells(repeated, others, share)} |"


def paired_table(records):
    """Every arm over the one to compare with, by means, by medians and seed by seed."""
    names = "means", "means, one seed left out", "medians", "seed by seed (95 %, Student's t)", "p"
    yield from head("target over guess", "global batch", "optimizer", *names)
    for share in (1.0, NEARER):
        for batch, name, repeated, others in compared(records, share):
            if others == repeated or has_missed(repeated, share) or has_missed(others, share):
                continue
            values, theirs = samples_of(repeated, share), samples_of(others, share)
            logs = np.log(values / theirs)
            found = ttest_1samp(logs, 0)
            low, high = np.exp(found.confidence_interval())
            without = (values.sum() - values) / (theirs.sum() - theirs)
            row = [f"{OVER_GUESS * share:.2f}", f"{batch:,}", name]
            row += [f"{values.mean() / theirs.mean():.2f}"]
            row += [f"{min(without):.2f} to {max(without):.2f}"]
            row += [f"{np.median(values) / np.median(theirs):.2f}"]
            row += [f"{np.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"]
            row += ["< 0.001" if found.pvalue < 0.001 else f"{found.pvalue:.3f}"]
            yield f"| {' | '.join(row)} |"


def cells(repeated, others, share):
    """Cells of `samples_table` beside those of `others`."""
    values = samples_of(repeated, share)
    reached = sum(each is not None for each in crossings(repeated, share))
    (draws,) = drawn_means(values)
    of_missed = [has_missed(each, share) for each in (repeated, others)]
    text = ""
    if others != repeated and len(others) == len(repeated) and not all(of_missed):
        theirs = samples_of(others, share)
        of_both = drawn_means(values, theirs)
        text = "at least " if of_missed[0] else "at most " if of_missed[1] else ""
        text += ranged(values.mean() / theirs.mean(), of_both[0] / of_both[1], ".2f")
    if not reached:
        return f"none | more than {values.min():,.0f} | | {text}"
    least = "at least " if of_missed[0] else ""
    samples, updates = ranged(values.mean(), draws, ",.0f"), values.mean() / repeated[0]["batch"]
    return f"{reached} of {len(repeated)} | {least}{samples} | {updates:,.0f} | {text}"


def settings_table(records):
    """Trials of every arm, and the settings of the best."""
    names = "rate", "warm-up", "falls for", "beta_2", "decay"
    yield from head("global batch", "optimizer", "trials", "reached", *names)
    keys = "schedule.warmup_steps", "schedule.decay_steps", "optim.beta_2", "optim.weight_decay"
    for batch in tuned(records):
        for optimizer in OPTIMIZERS:
            trials = of_arm(records, optimizer, batch, "trial")
            best = best_trial(records, optimizer, batch)
            if not trials:
                continue
            reached = sum(each["reached"] is not None for each in trials)
            row = [f"{batch:,}", NAMES[optimizer], str(len(trials)), str(reached)]
            rate = best["settings"]["optim.learning_rate"]
            rates = sorted(each["settings"]["optim.learning_rate"] for each in trials)
            edge = ", at the edge" if rate in (rates[0], rates[-1]) else ""
            row += [f"{rate:g}{edge}", *(f"{best['settings'][key]:g}" for key in keys)]
            yield f"| {' | '.join(row)} |"


def fitted(batches, samples):
    """Least samples and critical batch of samples = least (1 + batch / critical)."""

    def residuals(logs):
        least, critical = np.exp(logs)
        return np.log(least * (1 + batches / critical)) - np.log(samples)

    return np.exp(least_squares(residuals, np.log([samples.min(), batches.mean()])).x)


def fits(records, optimizer):
    """The fit and a thousand of drawn seeds, of batches without a miss; None below three."""
    arms = {batch: of_arm(records, optimizer, batch, "seed") for batch in BUDGETS}
    values = {
        batch: samples_of(arm, NEARER)
        for batch, arm in arms.items()
        if arm and not has_missed(arm, NEARER)
    }
    if len(values) < 3:
        return None
    batches = np.array(list(values), dtype=float)
    drawn = np.stack([drawn_means(each)[0][:1000] for each in values.values()], axis=1)
    centre = fitted(batches, np.array([each.mean() for each in values.values()]))
    return centre, np.array([fitted(batches, each) for each in drawn])


def fit_table(records):
    """Critical batches, the noise scales measured in the same runs, and what they say further."""
    noise = "noise scale at the target, plain and preconditioned"
    wide = f"samples at {LARGEST:,} (95 %)"
    yield from head("optimizer", "least samples", "critical batch (95 %)", noise, wide)
    for optimizer in OPTIMIZERS:
        found = fits(records, optimizer)
        if found is None:
            continue
        (least, critical), drawn = found
        largest = ranged(
            least * (1 + LARGEST / critical), drawn[:, 0] * (1 + LARGEST / drawn[:, 1]), ",.0f"
        )
        scales = np.median(list(noises(records, optimizer)), axis=0)
        row = NAMES[optimizer], f"{least:,.0f}", ranged(critical, drawn[:, 1], ",.0f")
        yield f"| {' | '.join(row)} | {scales[0]:,.0f}, {scales[1]:,.0f} | {largest} |"


def noises(records, optimizer, batches=tuple(BUDGETS)):
    """Last noise scales, plain and preconditioned, of every repetition at these batches."""
    for batch in batches:
        for each in of_arm(records, optimizer, batch, "seed"):
            if each["noise"] and all(each["noise"].values()):
                yield each["noise"]["noise_scale_plain"], each["noise"]["noise_scale"]


def noise_table(records):
    """From each batch to four times it: samples as measured, and as the noise scale predicts."""
    ratio, by = "samples, times as many (95 %)", "predicted by the noise scale"
    yield from head("optimizer", "batches", ratio, f"{by}: plain", "preconditioned")
    for optimizer in OPTIMIZERS:
        for batch, larger in pairwise(BUDGETS):
            arms = [of_arm(records, optimizer, each, "seed") for each in (batch, larger)]
            if not all(arms) or any(has_missed(arm, NEARER) for arm in arms):
                continue
            values = [samples_of(arm, NEARER) for arm in arms]
            draws = drawn_means(*values)
            measured = ranged(values[1].mean() / values[0].mean(), draws[1] / draws[0], ".2f")
            predicted = [
                (scale + larger) / (scale + batch)
                for scale in np.median(list(noises(records, optimizer, (batch,))), axis=0)
            ]
            row = NAMES[optimizer], f"{batch:,} to {larger:,}", measured
            yield f"| {' | '.join(row)} | {predicted[0]:.2f} | {predicted[1]:.2f} |"


def draw(records, path):
    """Samples to the target over the global batch, every run a dot, with the fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    largest = 0
    for optimizer in OPTIMIZERS:
        arms = [of_arm(records, optimizer, batch, "seed") for batch in BUDGETS]
        points = [
            (each["batch"], samples)
            for arm in arms
            for each, samples in zip(arm, crossings(arm, NEARER), strict=True)
            if samples
        ]
        colour, label = COLOURS[optimizer], NAMES[optimizer]
        axes.plot(*np.array(points).T, "o", ms=4, alpha=0.6, color=colour)
        largest = max([largest, *(batch for batch, _ in points)])
        found = fits(records, optimizer)
        if found is not None:
            (least, critical), _ = found
            batches = np.geomspace(min(BUDGETS), LARGEST)
            label += f": critical batch {critical:,.0f}"
            axes.plot(batches, least * (1 + batches / critical), color=colour)
        axes.plot([], [], "o-", color=colour, label=label)
    axes.axvspan(largest, LARGEST, color="#eeeeee", label="beyond the data")
    axes.set(xscale="log", yscale="log", xlabel="global batch, sequences")
    axes.set_ylabel("samples to 1.25 times the context-free guess")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
