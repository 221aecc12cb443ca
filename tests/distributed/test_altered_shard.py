"""Shards with other contents than their index or their digest says: refused by every rank.

Some boundaries between two samples lie a token, or a masked position, further on, with right
digests. Every number stays possible, so only a comparison of each sample with the index finds it.
Or bits of words are flipped: only the digest tells. Such shards once trained to the end, with other
losses.
"""

import re
import shutil
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from mlperf_bert.config.sections import BalancePolicy
from mlperf_bert.data.shards import Shard
from setting_pairs import choices
from setting_runs import Job, run_jobs
from support import metrics_records, mlperf_records, sets_of
from verify_cases import flip_words, sign

LOADERS = choices()["data.loader"]
POLICIES = get_args(BalancePolicy)
# The boundaries that move, and the masks with which that goes unseen.
ALTERED = {"offsets": "static", "masked_lm_offsets": "dynamic"}
QUICK = [("offsets", "none", "thread"), ("masked_lm_offsets", "exchange_global", "thread")]
SETTINGS = (
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=8", "run.max_steps=6"),
    *("eval.interval_samples=100000", "run.hang_timeout_s=60"),
)
MISTAKE, LOST = 2, 70


def move_boundaries(data, name):
    """Move every third boundary that can be moved unseen."""
    (path,) = (data / "train" / "shards").glob("*.hdf5")
    shard = Shard(path)
    arrays, place = shard.arrays(), shard.sidecar.datasets[name]
    lengths, counts, limits = shard.lengths(), shard.masked_counts(), shard.sidecar.settings
    of_sample = np.arange(1, len(lengths))
    if name == "offsets":
        is_unseen = (lengths[1:] > 6) & (lengths[:-1] < limits.max_seq_length)
    else:  # the first masked position of the next sample can be one of this sample too
        first = arrays.masked_lm_positions[arrays.masked_lm_offsets[of_sample]]
        is_unseen = (first < lengths[:-1]) & (counts[1:] > 1)
        is_unseen &= counts[:-1] < limits.max_predictions
    moved = of_sample[is_unseen][::3]
    assert len(moved) > 10
    table = np.memmap(path, "<i8", mode="r+", offset=place.offset, shape=(place.count,))
    table[moved] += 1
    table.flush()
    sign(data / "train")


@pytest.fixture(scope="module")
def altered(synthetic_data, tmp_path_factory):
    """A function: data of which the boundaries of this name have moved."""

    @cache
    def make(name):
        data = tmp_path_factory.mktemp(name) / "data"
        shutil.copytree(synthetic_data, data)
        move_boundaries(data, name)
        return data

    return make


def job_of(places, settings, output, **options):
    """A run with these options and settings, and where it prints to."""
    words = ["train"]
    for name, place in places.items():
        words += [f"--{name}", str(place)]
    return Job([*words, *sets_of(*settings)], str(output), **options)


def refusals_of(job):
    """All that the ranks said for errors, without a traceback."""
    printed = Path(job.output).read_text()
    assert "Traceback" not in printed, printed
    return re.findall(r"^mlperf_bert: error: (.*)$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "policy", "loader"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.longest)
        for case in product(ALTERED, POLICIES, LOADERS)
    ],
)
def test_moved_boundaries_are_one_line(tiny_config, altered, tmp_path, name, policy, loader):
    places = {"config": tiny_config, "data": altered(name), "run-dir": tmp_path / "run"}
    settings = (*SETTINGS, f"data.masking={ALTERED[name]}", f"data.loader={loader}")
    settings += (f"data.balance={policy}",)
    by_mpi = loader == "mpi_readers"
    job = job_of(places, settings, tmp_path / "output", by_mpi=by_mpi)
    (statuses,) = run_jobs([job])
    refusals = refusals_of(job)
    if by_mpi:  # mpiexec mixes the status with those of the readers that it kills
        assert statuses != [0], refusals
    else:
        assert set(statuses) <= {MISTAKE, LOST}, (statuses, refusals)
    assert any("the sizes of samples do not match the set's index" in each for each in refusals)


def test_flipped_bits_are_one_line_and_leave_no_result(tiny_config, synthetic_data, tmp_path):
    """A new run and a resumed one; the first step ends with an evaluation and a checkpoint."""
    checkpoint = tmp_path / "good/run_0/checkpoints/step_00000002"
    short = (*SETTINGS[:2], "checkpoint.interval_steps=1", "eval.interval_samples=16")
    places = {"config": tiny_config, "data": synthetic_data, "run-dir": tmp_path / "good"}
    good = job_of(places, (*short, "run.max_steps=2"), tmp_path / "good.txt")
    assert list(run_jobs([good])) == [[3, 3]] and checkpoint.is_dir()
    for part, resume in (("train", {}), ("eval", {"resume": checkpoint})):
        data, run_dir = tmp_path / part, tmp_path / f"run of {part}"
        shutil.copytree(synthetic_data, data)
        shard = data / part / f"shards/{part}.hdf5"
        flip_words(shard)
        places = {"config": tiny_config, "data": data, "run-dir": run_dir, **resume}
        job = job_of(places, (*short, "run.max_steps=4"), tmp_path / f"{part}.txt")
        assert list(run_jobs([job])) == [[MISTAKE, MISTAKE]]
        (refusal,) = refusals_of(job)
        assert f"{shard}: the file's SHA-256 differs from the one in the manifest" in refusal
        assert metrics_records(run_dir) == []
        assert list((run_dir / "run_0/checkpoints").iterdir()) == []
        assert mlperf_records(run_dir / "result_0.txt", "run_start")
        assert not mlperf_records(run_dir / "result_0.txt", "eval_accuracy")
