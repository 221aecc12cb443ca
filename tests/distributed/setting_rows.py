"""Rows of the covering array as runs, and the plainest row that must give the same losses.

`setting_rows.py RECORDS` trains all rows, one after the other, and writes a line of JSON for each.
"""

import json
import math
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from mlperf_bert.config.files import config_from_tables, tables_to_toml
from mlperf_bert.config.sections import CLIPPED_TOGETHER, PUBLISHED_STRATA
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.choices import choose_attention
from mlperf_bert.run.outcome import read_outcome
from setting_pairs import Array, choices
from setting_runs import RANKS, Job, run_jobs
from support import NUM_WORDS, prepare_small

STEPS = 6
TOLERANCE = 2e-5  # relative, of the loss of a step
# The longest sequence; documents, and words of one. Published strata are of long sequences; the
# interpreter of fused blocks takes 0.03 s of a core for a token.
SETS = {"tiny": (8, 90, (1, 6)), "short": (16, 60, (3, 14)), "long": (512, 64, (20, 500))}
FIXED = {
    **{"run.seed": 11, "run.device": "cpu", "run.max_steps": STEPS, "run.log_interval_steps": 1},
    **{"model.vocab_size": NUM_WORDS + 5, "model.hidden_size": 32},
    **{"model.num_heads": 2, "model.intermediate_size": 64, "model.initializer_range": 0.2},
    **{"model.layer_norm_epsilon": 1e-6, "parallel.ranks_per_node": RANKS},
    **{"optim.learning_rate": 1e-2, "schedule.decay_steps": 20, "schedule.warmup_steps": 1},
    **{"clip.max_norm": 2.0, "eval.target_accuracy": "none", "eval.interval_samples": 30},
    **{"checkpoint.keep_last": 9},
}
IF_MODERN = {"model.attention_window": 4, "model.global_attention_every": 2}
# What only changes how a step is computed.
COMPUTED = ("run.step_mode", "model.attention", "model.kernels")
# What has no part in a step.
APART = (*("run.warm_up_steps", "data.loader", "checkpoint.interval_steps"),)
# Who gets which samples, in how many micro-batches: no matter, if an update is a sum over all.
SHARED_OUT = (*("data.balance", "data.counts_per_rank", "parallel.grad_accum_steps"),)


def plainest(row):
    """The plainest row that must have the losses of `row`.

    In fp32 it is without all that only changes how a step is computed. Where something is rounded
    to fewer bits, every change of order shows, so there it is the same row with an optimizer that
    is whole on each rank, without what has no part in a step.
    """
    plain = {name: values[0] for name, values in choices().items()}
    found = row | {name: plain[name] for name in APART}
    by_bucket = row["clip.policy"] == "bucket_before_allreduce"
    # torch cuts its buckets by the order in which gradients come, which kernels change.
    if not (by_bucket and row["parallel.data_parallel"] == "ddp"):
        found["parallel.data_parallel"] = "flat"
    if is_rounded(row):
        return found
    if found["parallel.data_parallel"] != "ddp":
        found |= {name: plain[name] for name in COMPUTED}
    if not by_bucket:
        found["parallel.data_parallel"] = plain["parallel.data_parallel"]
        found["parallel.bucket_cap_mb"] = plain["parallel.bucket_cap_mb"]
    if row["clip.policy"] in CLIPPED_TOGETHER and row["optim.loss_normalization"] == "global":
        batch = int(row["parallel.grad_accum_steps"]) * int(row["parallel.local_batch_size"])
        found |= {name: plain[name] for name in SHARED_OUT}
        found["parallel.local_batch_size"] = batch
    return found


def is_rounded(row):
    """True if weights, gradients or products are rounded to fewer bits than float32 has."""
    return row["model.precision"] != "fp32" or row["parallel.allreduce_dtype"] != "as_gradients"


def set_of(row):
    """The name of the sets that a row is trained on."""
    if row["data.sampler"] in PUBLISHED_STRATA:
        return "long"
    return "tiny" if row["model.kernels"] == "fused" else "short"


def tables_of(row, sets):
    """The config of a row on these sets, as tables."""
    longest = SETS[sets][0]
    settings = FIXED | {
        **{"data.max_seq_length": longest, "model.max_position_embeddings": longest},
        **{"data.max_predictions": longest // 4, "model.num_layers": 1 if sets == "tiny" else 2},
        **({"data.masking_rate": 0.25} if row["data.masking"] == "dynamic" else {}),
        **({"schedule.cooldown_steps": 10} if row["schedule.form"] == "wsd" else {}),
        **(IF_MODERN if row["model.architecture"] == "modern" else {}),
        # Reducers sum the squares of a norm in different orders. Its last bit scales every gradient
        # that is clipped, and may flip a weight's rounding: 1e-3 of a loss in 16 bits.
        **({"clip.max_norm": 1e3} if is_rounded(row) and by_norm(row) else {}),
    }
    tables = {}
    for name, value in (settings | row).items():
        section, _, field = name.partition(".")
        tables.setdefault(section, {})[field] = value
    return tables


def by_norm(row):
    """True if gradients are clipped by the norm of what was received."""
    return row["clip.policy"] == "after_allreduce"


def make_sets(directory):
    """Prepare the sets of SETS below a directory."""
    vocabulary = directory / "words.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *(f"w{n}" for n in range(NUM_WORDS))]) + "\n")
    for name, (longest, documents, words) in SETS.items():
        for split, count in (("train", documents), ("eval", 8)):
            text = directory / f"{name}-{split}.txt"
            text.write_text("\n".join(_documents(random.Random(split), count, words)))
            limits = {"max_seq_length": longest, "max_predictions": longest // 4}
            prepare_small([text], vocabulary, directory / name / split, dupe_factor=1, **limits)
    return directory


def _documents(random, count, words):
    """Texts of sentences of up to nine words; as many texts in each part of the range `words`."""
    texts = []
    for number in range(count):
        left = words[0] + (words[1] - words[0]) * number // max(count - 1, 1)
        lines = []
        while left > 0:
            length = min(left, random.randint(2, 9))
            first = random.randrange(NUM_WORDS)
            lines.append(" ".join(f"w{(first + 3 * n) % NUM_WORDS}" for n in range(length)))
            left -= length
        texts.append("\n".join(lines) + "\n")
    random.shuffle(texts)
    return texts


def open_indexes(sets):
    """The training sets' indexes, by name."""
    return {name: LengthIndex.open(sets / name / "train") for name in SETS}


def is_allowed(indexes, row):
    """Raise ConfigError if the program refuses the row, or it cannot be run here."""
    config = config_from_tables(tables_of(row, set_of(row)), "row")
    choose_attention(config.model, torch.device("cpu"), torch.float32)
    make_planner(config, indexes[set_of(row)], seed=1)
    if row["model.kernels"] == "fused" and set_of(row) == "long":
        problem = "of the interpreter take minutes for the sequences of data.sampler"
        raise ConfigError("model.kernels", problem, "use a GPU")


def make_array(sets, *, exact=False):
    """The covering array of all settings, or of those that round to no fewer bits.

    Of the latter every pair is compared with a run that is plain in both settings. `sets` are those
    of `make_sets`.
    """
    fixed = {"model.precision": ("fp32",), "parallel.allreduce_dtype": ("as_gradients",)}
    factors = choices() | (fixed if exact else {})
    return Array(factors, partial(is_allowed, open_indexes(sets)))


def run_pairs(pairs, sets, directory, *, waits=True):
    """Train both rows of each pair on the sets of the first; what they came to."""
    jobs = {}
    for row, plain in pairs:
        for each in (row, plain):
            place = directory / str(len(jobs))
            job = _job(each, set_of(row), sets, place, waits=waits)
            jobs.setdefault(_key(each, set_of(row)), job)
    failed = {}
    done = run_jobs(jobs.values())
    for number, ((key, job), statuses) in enumerate(zip(jobs.items(), done, strict=True), start=1):
        if sys.stderr.isatty():
            print(f"\r{number} of {len(jobs)} runs", end="", file=sys.stderr, flush=True)
        if any(statuses):
            failed[key] = f"{statuses}: {Path(job.output).read_text()[-2000:]}"
    found = []
    for row, plain in pairs:
        keys = [_key(each, set_of(row)) for each in (row, plain)]
        record = {
            "row": row,
            "differs_in": [name for name in row if row[name] != plain[name]],
            "problems": [failed[key] for key in keys if key in failed],
        }
        if not record["problems"]:
            index = LengthIndex.open(sets / set_of(row) / "eval")
            record |= _compared(index, *(Path(jobs[key].output) for key in keys))
        found.append(record)
    return found


def run_rows(rows, sets, directory):
    """Train each row and its plainest; what each pair came to."""
    return run_pairs([(row, plainest(row)) for row in rows], sets, directory)


def _key(row, sets):
    return json.dumps([row, sets], sort_keys=True)


def _job(row, of, sets, place, *, waits):
    """The run of a row on the sets of this name, in a directory that is made for it."""
    place.mkdir(parents=True, exist_ok=True)
    config, tables = place / "row.toml", tables_of(row, of)
    config.write_text(tables_to_toml(tables))
    words = ["train", "--config", config, "--data", sets / of, "--run-dir", place / "run"]
    return Job(
        words=[str(word) for word in words],
        output=str(place / "output.txt"),
        by_mpi=tables["data"]["loader"] == "mpi_readers",
        waits=waits,
    )


def _compared(held_out, output, plain_output):
    """What two runs came to; `difference` is the largest of a step's loss, as a share of it."""
    (losses, accuracy), (plain_losses, plain_accuracy) = map(_found, (output, plain_output))
    far = [abs(one / other - 1) for one, other in zip(losses, plain_losses, strict=True)]
    return {
        "losses": losses,
        "plain_losses": plain_losses,
        "difference": max(far) if all(map(math.isfinite, far)) else math.inf,
        "accuracy_difference": abs(accuracy - plain_accuracy),
        # Two words may be equally likely except for rounding.
        "one_prediction": 1.001 / int(held_out.masked_counts.sum(dtype=int)),
    }


def _found(output):
    """Losses of all steps (NaN where the file has none), and the last accuracy."""
    run = output.with_name("run") / "run_0"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [math.nan if each["loss"] is None else each["loss"] for each in records]
    accuracy = read_outcome(run / "outcome.json").mlm_accuracy
    assert accuracy is not None
    return losses, accuracy


def main(records):
    """Train all rows and write what the arrays hold, then a record for each row."""
    with tempfile.TemporaryDirectory() as name:
        sets = Path(name) / "sets"
        sets.mkdir()
        make_sets(sets)
        arrays = [make_array(sets, exact=exact) for exact in (False, True)]
        rows = [row for array in arrays for row in array.rows]
        started = time.monotonic()
        found = run_rows(rows, sets, Path(name))
    head = {
        "rows": [len(array.rows) for array in arrays],
        "pairs": [array.covered for array in arrays],
        "values_refused": arrays[0].alone,
        "pairs_refused": sorted(sorted(map(list, each)) for each in arrays[0].refused),
        "seconds": round(time.monotonic() - started),
    }
    records.write_text("".join(f"{json.dumps(each)}\n" for each in (head, *found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
