"""The second campaign: AdamW, LAMB, Muon and NorMuon tuned with long warm-ups, with equal budgets.

    python fair.py DATA WORK [--batches 128,512] [--optimizers adamw,muon] [--workers 2]
    python fair.py table | seeds | chosen | earlier | growth

README.md beside this file says what is compared and how. It was committed before the first run. The
records are in fair.jsonl. An interrupted study continues with the same command, as study.py does.

For each batch, TRIALS settings of rate, warm-up and weight decay an optimizer, from one Latin
hypercube for all, and MORE_TRIALS with higher rates and longer warm-ups. Half of them go on at a
quarter and at half of the budget. The best FINALISTS are trained with a second seed, and the one
with the fewest samples over both seeds is trained with SEEDS seeds that no trial had. At 128 a
training ends at 1.5 times the guess, and from NEARER_BATCH on at 1.25 times, which is what is
judged at both.
"""

import json
import sys
from itertools import product

import numpy as np
from scipy.stats import ttest_1samp, ttest_ind
from scipy.stats.qmc import LatinHypercube

import study as first
from study import (
    BUDGETS,
    LONGEST,
    RATE_POWER,
    RATES,
    Study,
    Training,
    crossing,
    goal,
    longest,
    rank,
)

RECORDS = first.HERE / "fair.jsonl"
BATCHES = (128, 512)
OPTIMIZERS = {128: tuple(RATES), 512: ("adamw", "lamb", "muon")}
NEARER_BATCH = 512  # from this batch on a training ends at the nearer target
TRIALS, FINALISTS, SEEDS = 16, 4, 7
MORE_TRIALS = {128: 0, 512: 4}
SECOND_SEED, FIRST_FRESH_SEED = 12, 201
WARM_UP, DECAY = (0.01, 0.4), first.DECAY
BETA_2 = 0.98  # between those of the first campaign's winners, 0.92 to 0.999
NAMES = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon", "normuon": "NorMuon"}
JUDGED = 5  # comparisons, also before all of them were run
# What is judged comes first.
TARGETS = ((128, first.NEARER_OVER_GUESS), (512, first.NEARER_OVER_GUESS), (128, first.OVER_GUESS))
COMPARED = (("lamb", "adamw"), ("muon", "adamw"), ("normuon", "muon"))


class FairTraining(Training):
    """A training of this campaign. Trials share a seed, and finalists get a second one."""

    @property
    def seed(self):
        """Seed of the weights, the sample order and dropout."""
        fixed = {"trial": first.TRIAL_SEED, "second": SECOND_SEED}
        return fixed.get(self.kind, FIRST_FRESH_SEED + self.number)

    def target(self, guess):
        """Accuracy at which it ends."""
        is_nearer = self.batch >= NEARER_BATCH
        return goal(first.NEARER_OVER_GUESS if is_nearer else first.OVER_GUESS, guess)


def drawn(optimizer, batch):
    """The settings of each trial: the same points for every optimizer, rates in its own range."""
    steps, scale = BUDGETS[batch] // batch, (batch / 32) ** RATE_POWER
    points = LatinHypercube(3, seed=batch + 1).random(TRIALS)
    more = LatinHypercube(3, seed=batch + 2).random(MORE_TRIALS[batch])
    more[:, :2] = (0.5, 0.8) + more[:, :2] * (0.4, 0.2)  # the upper parts of rate and warm-up
    for rate, warm_up, decay in np.concatenate([points, more]):
        highest = first._between([scale * each for each in RATES[optimizer]], rate)
        yield {
            "optim.learning_rate": highest,
            "schedule.end_learning_rate": float(f"{first.LAST_RATE * highest:.4g}"),
            "schedule.decay_steps": steps,
            "schedule.warmup_steps": max(1, round(steps * first._between(WARM_UP, warm_up))),
            "optim.beta_2": BETA_2,
            "optim.weight_decay": first._between(DECAY, decay),
        }


class FairStudy(Study):
    """The same trainings, ranked on two seeds before the winner gets its fresh ones."""

    path, draw, training = RECORDS, staticmethod(drawn), FairTraining

    def run_all(self, batches):
        """All trainings of these batches, one batch after the other."""
        chosen = self.optimizers
        for batch in batches:
            arms = set(OPTIMIZERS[batch]) - {"normuon"}  # the program no longer has this rule
            self.optimizers = [each for each in chosen if each in arms]
            self.tune(batch)
            finalists = {each: self.finalists(each, batch) for each in self.optimizers}
            self.train(
                {
                    FairTraining(
                        optimizer, batch, "second", record["number"], record["settings"]
                    ): 1
                    for optimizer, records in finalists.items()
                    for record in records
                },
                "with a second seed",
            )
            winners = {each: self.winner(each, batch) for each in self.optimizers}
            self.train(
                {
                    FairTraining(optimizer, batch, "seed", number, winner["settings"]): LONGEST
                    for number, (optimizer, winner) in product(range(SEEDS), winners.items())
                },
                "with a fresh seed",
            )

    def limit(self, training, share):
        """Samples after which to put it aside. Here no trial ends because another was faster."""
        return min(share * BUDGETS[training.batch], longest(training.batch))

    def finalists(self, optimizer, batch):
        """Records of the best trials."""
        return finalists_of(self.records, optimizer, batch)

    def winner(self, optimizer, batch):
        """The finalist with the fewest samples over both seeds. A miss is LONGEST budgets."""
        return by_both_seeds(self.records, optimizer, batch)[0][0]


def finalists_of(records, optimizer, batch):
    """Records of an arm's best trials."""
    return sorted(of_arm(records, optimizer, batch, "trial"), key=rank)[:FINALISTS]


def by_both_seeds(records, optimizer, batch):
    """Pairs of a finalist's records with the trials' seed and the second one, the best first."""
    second = {each["number"]: each for each in of_arm(records, optimizer, batch, "second")}
    pairs = [(each, second[each["number"]]) for each in finalists_of(records, optimizer, batch)]
    return sorted(
        pairs,
        key=lambda pair: (
            _samples(pair[0]) * _samples(pair[1]),
            -pair[0]["best"] - pair[1]["best"],
        ),
    )


def of_arm(records, optimizer, batch, kind):
    """Records of one kind, by number."""
    found = [
        each
        for each in records.values()
        if (each["optimizer"], each["batch"], each["kind"]) == (optimizer, batch, kind)
    ]
    return sorted(found, key=lambda each: each["number"])


def _samples(record):
    return record["reached"] or LONGEST * BUDGETS[record["batch"]]


def samples_to(over_guess, record):
    """Samples to a target, and whether it was missed. A miss counts as all that was trained."""
    trained = first.NEARER_OVER_GUESS if record["batch"] >= NEARER_BATCH else first.OVER_GUESS
    found = crossing(record["curve"], record["target"] * over_guess / trained)
    return found or record["samples"], found is None


def ratios(records, one, other, batch, over_guess):
    """Logarithms of samples over the other optimizer's, seed by seed, and whether one missed."""
    arms = [of_arm(records, each, batch, "seed") for each in (one, other)]
    found = [[samples_to(over_guess, record) for record in arm] for arm in arms]
    pairs = list(zip(*found, strict=False))
    logs = np.log([mine[0] / theirs[0] for mine, theirs in pairs])
    return logs, any(mine[1] or theirs[1] for mine, theirs in pairs)


def sign_flips(logs):
    """Exact two-sided chance of a mean as far from 0, if each sign were as likely as the other."""
    means = [abs(np.mean(signs * logs)) for signs in product((1, -1), repeat=len(logs))]
    return np.mean(np.array(means) >= abs(logs.mean()) - 1e-12)


def read_records(path=RECORDS):
    """The records by name. Of several lines with one name, the last counts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["name"]: each for each in lines}


def chosen():
    """Print the winner of each arm whose finalists have both seeds, and how it was found."""
    records = read_records()
    heads = "global batch, optimizer, trials, reached, rate, warm-up of the budget, decay"
    print("|", heads.replace(", ", " | "), "| samples, trials' seed and second seed |")
    print("|---" * 8 + "|")
    for batch in BATCHES:
        for optimizer in OPTIMIZERS[batch]:
            if len(of_arm(records, optimizer, batch, "second")) < FINALISTS:
                continue
            trials = of_arm(records, optimizer, batch, "trial")
            pair = by_both_seeds(records, optimizer, batch)[0]
            settings = pair[0]["settings"]
            share = settings["schedule.warmup_steps"] / settings["schedule.decay_steps"]
            cells = [
                batch,
                NAMES[optimizer],
                len(trials),
                sum(each["reached"] is not None for each in trials),
                settings["optim.learning_rate"],
                f"{share:.0%}",
                settings["optim.weight_decay"],
                ", ".join(f"{each['reached']:,}" if each["reached"] else "missed" for each in pair),
            ]
            print("|", *(f"{each} |" for each in cells))


def seeds():
    """Print the samples that the fresh seeds of each arm needed."""
    records = read_records()
    heads = "global batch, target over guess, optimizer, reached, geometric mean (95 %)"
    print("|", heads.replace(", ", " | "), "| median | least to most |")
    print("|---" * 7 + "|")
    for batch, over_guess in TARGETS:
        for optimizer in OPTIMIZERS[batch]:
            arm = of_arm(records, optimizer, batch, "seed")
            if len(arm) < SEEDS:
                continue
            needed, missed = zip(*(samples_to(over_guess, record) for record in arm), strict=True)
            logs = np.log(needed)
            low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
            note = " (a bound: a seed missed)" if any(missed) else ""
            cells = [
                batch,
                f"{over_guess:.2f}",
                NAMES[optimizer],
                f"{SEEDS - sum(missed)} of {SEEDS}",
                f"{np.exp(logs.mean()):,.0f} ({low:,.0f} to {high:,.0f}){note}",
                f"{np.median(needed):,.0f}",
                f"{min(needed):,} to {max(needed):,}",
            ]
            print("|", *(f"{each} |" for each in cells))


def earlier():
    """Print the fresh seeds over those of the first campaign, and over the choosing ones."""
    now, before = read_records(), read_records(first.RECORDS)
    heads = "global batch, fresh seeds of, target over guess, over the first campaign (95 %)"
    print("|", heads.replace(", ", " | "), "| over the choice |")
    print("|---" * 5 + "|")
    for batch in BATCHES:
        trained = first.NEARER_OVER_GUESS if batch >= NEARER_BATCH else first.OVER_GUESS
        for optimizer, over_guess in product(OPTIMIZERS[batch], (1.25, 1.5)):
            arms = [of_arm(records, optimizer, batch, "seed") for records in (now, before)]
            if len(arms[0]) < SEEDS or over_guess > trained:
                continue
            found = [[samples_to(over_guess, each) for each in arm] for arm in arms]
            # The first campaign trained to the farther target, also at 512.
            if batch >= NEARER_BATCH:
                found[1] = [nearer_of_first(each) for each in arms[1]]
            ours, theirs = (np.log([needed for needed, _ in arm]) for arm in found)
            is_whole = len(theirs) > 0 and not any(missed for _, missed in found[1])
            chose = [_samples(each) for each in by_both_seeds(now, optimizer, batch)[0]]
            over_choice = np.exp(ours.mean() - np.log(chose).mean())
            cells = [
                batch,
                NAMES[optimizer],
                f"{over_guess:.2f}",
                welch(ours, theirs) if is_whole else "",
                f"{over_choice:.2f}" if over_guess == trained else "",
            ]
            print("|", *(f"{each} |" for each in cells))
        if len(of_arm(now, "muon", batch, "seed")) == SEEDS:
            logs = [ratios(now, "muon", "adamw", batch, 1.25)[0], first_ratios(before, batch)]
            print(f"| {batch} | Muon over AdamW | 1.25 | {welch(*logs)} | |")
    old = [nearer_of_first(each)[0] for each in of_arm(before, "muon", 512, "seed")]
    new = [samples_to(1.25, each)[0] for each in of_arm(now, "adamw", 512, "seed")]
    print(
        f"| 512 | Muon's old seeds over AdamW's new | 1.25 | {welch(np.log(old), np.log(new))} | |"
    )


def nearer_of_first(record):
    """Samples to the nearer target in a training of the first campaign, and whether it missed."""
    share = first.NEARER_OVER_GUESS / first.OVER_GUESS
    found = crossing(record["curve"], record["target"] * share)
    return found or record["samples"], found is None


def first_ratios(before, batch):
    """Logarithms of Muon's samples over AdamW's in the first campaign, to the nearer target."""
    arms = [of_arm(before, each, batch, "seed") for each in ("muon", "adamw")]
    pairs = [[nearer_of_first(record)[0] for record in arm] for arm in arms]
    return np.log(np.divide(*pairs))


def welch(logs, others):
    """The ratio of two geometric means, with its interval by Welch's t of the logarithms."""
    low, high = np.exp(ttest_ind(logs, others, equal_var=False).confidence_interval())
    return f"{np.exp(logs.mean() - others.mean()):.2f} ({low:.2f} to {high:.2f})"


def growth():
    """Print how many times as many samples each arm needed at 512 as at 128, seed by seed."""
    records = read_records()
    small, large = BATCHES
    print("| optimizer | samples at 512 over those at 128 (95 %) |")
    print("|---" * 2 + "|")
    grown = {}
    for optimizer in ("adamw", "muon"):
        arms = [of_arm(records, optimizer, batch, "seed") for batch in (large, small)]
        needed = [[samples_to(1.25, record)[0] for record in arm] for arm in arms]
        grown[optimizer] = np.log(np.divide(*needed))
        print(f"| {NAMES[optimizer]} | {one_ratio(grown[optimizer])} |")
    print(f"| Muon over AdamW | {one_ratio(grown['muon'] - grown['adamw'])} |")


def one_ratio(logs):
    """The geometric mean of ratios, with its interval by Student's t of the logarithms."""
    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    return f"{np.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"


def table():
    """Print the comparisons whose arms have their seeds, with Holm's limits for those judged."""
    records = read_records()
    judged, others = [], []
    for (batch, over_guess), (one, other) in product(TARGETS, COMPARED):
        logs, has_missed = ratios(records, one, other, batch, over_guess)
        if len(logs) < SEEDS:
            continue
        p = ttest_1samp(logs, 0).pvalue
        note = " (a bound: a seed missed)" if has_missed else ""
        cells = [
            batch,
            f"{over_guess:.2f}",
            f"{NAMES[one]} over {NAMES[other]}",
            f"{one_ratio(logs)}{note}",
            f"{np.exp(np.median(logs)):.2f}",
            f"{sign_flips(logs):.3f}",
            "< 0.0001" if p < 1e-4 else f"{p:.4f}",
        ]
        rows = judged if over_guess == first.NEARER_OVER_GUESS else others
        rows.append((p, cells))
    heads = "global batch, target over guess, compared, samples (95 %), median, p (sign flips)"
    print("|", heads.replace(", ", " | "), "| p (t) | shown |")
    print("|---" * 8 + "|")
    going = True
    for place, (p, cells) in enumerate(sorted(judged, key=lambda row: row[0])):
        going = going and p <= 0.05 / (JUDGED - place)
        print("|", *(f"{each} |" for each in [*cells, "yes" if going else "no"]))
    for _, cells in others:
        print("|", *(f"{each} |" for each in [*cells, "not judged"]))


if __name__ == "__main__":
    tables = {each.__name__: each for each in (table, seeds, chosen, earlier, growth)}
    printed = tables.get(" ".join(sys.argv[1:]))
    printed() if printed else first.main(FairStudy, BATCHES)
