"""Tables and the picture of the study, from `records.jsonl`.

python tables.py samples|nearer|paired|growth|settings|fit|noise     Markdown
python tables.py picture FILE.png                             samples over batch

`nearer` has samples to 1.25 times the guess, passed by runs on their way to 1.5; fits and picture
are of these too, as more arms reached it. `paired` compares arms seed by seed.

Intervals are Student's t of logarithms. A run that missed the target counts as all the samples that
it was trained on, which are fewer than it needs. So what is made from it is "at least" (or "at
most", where AdamW's missed), and only that end of its interval holds, because the mean of what is
needed lies beyond the mean of these bounds. Of two arms that both missed it, nothing is said.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import curve_fit
from scipy.stats import permutation_test, ttest_1samp

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

NAMES = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon", "normuon": "NorMuon"}
COLOURS = {"adamw": "#2f6f9f", "lamb": "#8a63b0", "muon": "#d9722e", "normuon": "#3f8f5b"}
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
        "growth": growth_table,
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


def geometric(values, form, bound=""):
    """Geometric mean with its 95 % interval; of bounds only the end that holds."""
    logs = np.log(values)
    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    ends = {"": f"{low:{form}} to {high:{form}}"}
    ends |= {"at least ": f"from {low:{form}}", "at most ": f"to {high:{form}}"}
    return f"{bound}{np.exp(logs.mean()):{form}} ({ends[bound]})"


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
    """Samples to a share of the target."""
    names = "mean", "median", "geometric mean (95 %)"
    yield from head("global batch", "optimizer", "reached", *names, "updates, mean")
    for batch, name, repeated, _ in compared(records, share):
        values = samples_of(repeated, share)
        reached = sum(each is not None for each in crossings(repeated, share))
        if not reached:
            yield f"| {batch:,} | {name} | none | more than {values.min():,.0f} | | | |"
            continue
        bound = "at least " if has_missed(repeated, share) else ""
        row = [f"{batch:,}", name, f"{reached} of {len(values)}"]
        row += [f"{bound}{each:,.0f}" for each in (values.mean(), np.median(values))]
        row += [geometric(values, ",.0f", bound), f"{bound}{values.mean() / batch:,.0f}"]
        yield f"| {' | '.join(row)} |"


def paired_table(records):
    """Every arm over the one to compare with, by means, by medians and seed by seed."""
    names = "means", "means, one seed left out", "medians", "seed by seed (95 %)"
    chances = "p, Student's t", "p, sign flips"
    yield from head("target over guess", "global batch", "optimizer", *names, *chances)
    for share in (1.0, NEARER):
        for batch, name, repeated, others in compared(records, share):
            row = cells(repeated, others, share) if others != repeated else None
            if row:
                row = [f"{OVER_GUESS * share:.2f}", f"{batch:,}", name, *row]
                yield f"| {' | '.join(row)} |"


def cells(repeated, others, share):
    """Cells of `paired_table`; None where both arms missed the target."""
    missed, theirs_missed = (has_missed(each, share) for each in (repeated, others))
    if missed and theirs_missed:
        return None
    values, theirs = samples_of(repeated, share), samples_of(others, share)
    bound = "at least " if missed else "at most " if theirs_missed else ""
    without = (values.sum() - values) / (theirs.sum() - theirs)
    logs = np.log(values / theirs)
    flips = permutation_test([logs], np.mean, permutation_type="samples").pvalue
    return [
        f"{bound}{values.mean() / theirs.mean():.2f}",
        f"{bound}{min(without):.2f} to {max(without):.2f}",
        f"{bound}{np.median(values) / np.median(theirs):.2f}",
        geometric(values / theirs, ".2f", bound),
        chance(ttest_1samp(logs, 0).pvalue),
        chance(flips),
    ]


def chance(value):
    """The chance of a ratio as far from 1 without a difference."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def growth_table(records):
    """Muon's samples over AdamW's to the nearer target, over the same ratio at a batch of 128."""
    yield from head("global batch", "ratio over that at 128, seed by seed (95 %)")
    ratios = {
        batch: samples_of(of_arm(records, "muon", batch, "seed"), NEARER)
        / samples_of(of_arm(records, "adamw", batch, "seed"), NEARER)
        for batch in (128, 512, 2048)
    }
    for batch in (512, 2048):
        yield f"| {batch:,} | {geometric(ratios[batch] / ratios[128], '.2f')} |"


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


def fitted(records, optimizer):
    """Least samples and critical batch of samples = least (1 + batch / critical), [seeds, 2].

    One fit for each seed, by least squares of logarithms, because the runs of a seed at several
    batches are not independent. Of batches without a miss; None below three.
    """
    arms = [of_arm(records, optimizer, batch, "seed") for batch in BUDGETS]
    arms = [arm for arm in arms if arm and not has_missed(arm, NEARER)]
    if len(arms) < 3:
        return None
    batches = np.array([arm[0]["batch"] for arm in arms], dtype=float)

    def law(batches, least, critical):
        return least + np.log1p(batches / np.exp(critical))

    found = []
    for samples in np.stack([samples_of(arm, NEARER) for arm in arms], axis=1):
        start = np.log([samples.min(), batches.mean()])
        found.append(curve_fit(law, batches, np.log(samples), start)[0])
    return np.exp(found)


def fit_table(records):
    """Critical batches, and the noise scales measured in the same runs."""
    noise = "noise scale at the target, plain and preconditioned"
    yield from head("optimizer", "least samples (95 %)", "critical batch (95 %)", noise)
    fits = {each: fitted(records, each) for each in OPTIMIZERS}
    for optimizer, found in fits.items():
        if found is None:
            continue
        row = [NAMES[optimizer], *(geometric(values, ",.0f") for values in found.T)]
        scales = np.median(list(noises(records, optimizer)), axis=0)
        yield f"| {' | '.join(row)} | {scales[0]:,.0f}, {scales[1]:,.0f} |"
    ratios = fits["muon"] / fits["adamw"]
    cells = " | ".join(geometric(values, ".2f") for values in ratios.T)
    yield f"| Muon over AdamW, seed by seed | {cells} | |"


def noises(records, optimizer, batches=tuple(BUDGETS)):
    """Last noise scales, plain and preconditioned, of every repetition at these batches."""
    for batch in batches:
        for each in of_arm(records, optimizer, batch, "seed"):
            if each["noise"] and all(each["noise"].values()):
                yield each["noise"]["noise_scale_plain"], each["noise"]["noise_scale"]


def noise_table(records):
    """From each batch to four times it: samples as measured, and as the noise scale predicts."""
    ratio, by = "samples, times as many, seed by seed (95 %)", "predicted by the noise scale"
    yield from head("optimizer", "batches", ratio, f"{by}: plain", "preconditioned")
    for optimizer in OPTIMIZERS:
        for batch, larger in pairwise(BUDGETS):
            arms = [of_arm(records, optimizer, each, "seed") for each in (batch, larger)]
            if not all(arms) or any(has_missed(arm, NEARER) for arm in arms):
                continue
            values = [samples_of(arm, NEARER) for arm in arms]
            measured = geometric(values[1] / values[0], ".2f")
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
    for optimizer in OPTIMIZERS:
        arms = [of_arm(records, optimizer, batch, "seed") for batch in BUDGETS]
        if not any(arms):
            continue
        points = [
            (each["batch"], samples)
            for arm in arms
            for each, samples in zip(arm, crossings(arm, NEARER), strict=True)
            if samples
        ]
        colour, label = COLOURS[optimizer], NAMES[optimizer]
        axes.plot(*np.array(points).T, "o", ms=4, alpha=0.6, color=colour)
        found = fitted(records, optimizer)
        if found is not None:
            least, critical = np.exp(np.log(found).mean(axis=0))
            batches = np.geomspace(min(BUDGETS), max(BUDGETS))
            label += f": critical batch {critical:,.0f}"
            axes.plot(batches, least * (1 + batches / critical), color=colour)
        axes.plot([], [], "o-", color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="global batch, sequences")
    axes.set_ylabel("samples to 1.25 times the context-free guess")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
