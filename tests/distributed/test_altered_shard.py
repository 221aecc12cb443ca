"""Shards with other contents than their index or their digest says: refused by every rank.

Some boundaries between two samples lie a token, or a masked position, further on, with right
digests. Every number stays possible, so only a comparison of each sample with the index finds it.
Or bits of words are flipped: only the digest tells. Such shards once trained to the end, with other
losses.
"""

import re
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from mlperf_bert.config.sections import BalancePolicy
from mlperf_bert.data.shards import Shard
from setting_pairs import choices
from setting_runs import Job, run_jobs
from support import metrics_records, mlperf_records
from verify_cases import flip_words, sign

LOADERS = choices()["data.loader"]
POLICIES = get_args(BalancePolicy)
# The boundaries that move, and the masks with which that goes unseen.
ALTERED = {"offsets": "static", "masked_lm_offsets": "dynamic"}
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


@pytest.fixture(scope="module", params=ALTERED)
def altered(request, synthetic_data, tmp_path_factory):
    """The data, and a setting with which nothing else would tell."""
    data = tmp_path_factory.mktemp("altered") / "data"
    shutil.copytree(synthetic_data, data)
    move_boundaries(data, request.param)
    return data, f"data.masking={ALTERED[request.param]}"


@pytest.mark.parametrize(
    "loader", ["thread", *(pytest.param(each, marks=pytest.mark.longest) for each in LOADERS[1:])]
)
def test_every_policy_refuses_it_in_one_line(tiny_config, altered, tmp_path, loader):
    data, masking = altered
    jobs = {}
    for policy in POLICIES:
        words = ["train", "--config", tiny_config, "--data", data, "--run-dir", tmp_path / policy]
        for setting in (*SETTINGS, masking, f"data.loader={loader}", f"data.balance={policy}"):
            words += ["--set", setting]
        output = str(tmp_path / f"{policy}.txt")
        jobs[policy] = Job([str(word) for word in words], output, loader == "mpi_readers")
    done = run_jobs(list(jobs.values()), tmp_path)
    for (policy, job), statuses in zip(jobs.items(), done, strict=True):
        printed = Path(job.output).read_text()
        if job.by_mpi:  # mpiexec mixes the status with those of the readers that it kills
            assert statuses != [0], (policy, printed)
        else:
            assert set(statuses) <= {MISTAKE, LOST}, (policy, statuses, printed)
        assert "Traceback" not in printed, (policy, printed)
        refusals = re.findall(r"^mlperf_bert: error: (.*)$", printed, re.MULTILINE)
        assert any("has samples of other sizes than its index says" in each for each in refusals), (
            policy,
            printed,
        )


def test_flipped_bits_are_one_line_and_leave_no_result(tiny_config, synthetic_data, tmp_path):
    """A new run and a resumed one; the first step ends with an evaluation and a checkpoint."""
    checkpoint = tmp_path / "good/run_0/checkpoints/step_00000002"
    jobs = {"good": Job([], "")}
    for part in ("train", "eval"):
        shutil.copytree(synthetic_data, tmp_path / part)
        flip_words(tmp_path / part / part / f"shards/{part}.hdf5")
        jobs |= {f"new {part}": Job([], ""), f"resumed {part}": Job([], "")}
    for name in jobs:
        how, _, part = name.partition(" ")
        words = ["train", "--config", tiny_config, "--run-dir", tmp_path / name]
        words += ["--data", tmp_path / part if part else synthetic_data]
        words += ["--resume", checkpoint] if how == "resumed" else []
        for setting in (*SETTINGS[:2], "checkpoint.interval_steps=1", "eval.interval_samples=16"):
            words += ["--set", setting]
        words += ["--set", f"run.max_steps={4 if part else 2}"]
        jobs[name] = Job([str(word) for word in words], str(tmp_path / f"{name}.txt"))
    done = run_jobs(list(jobs.values()), tmp_path)
    for (name, job), statuses in zip(jobs.items(), done, strict=True):
        printed, part = Path(job.output).read_text(), name.partition(" ")[2]
        if not part:
            assert statuses == [3, 3] and checkpoint.is_dir(), printed
            continue
        assert statuses == [MISTAKE, MISTAKE], (name, printed)
        assert "Traceback" not in printed
        (refusal,) = re.findall(r"^mlperf_bert: error: (.*)$", printed, re.MULTILINE)
        shard = tmp_path / part / part / f"shards/{part}.hdf5"
        assert f"{shard}: is not the file that the manifest names" in refusal
        run_dir = tmp_path / name
        assert metrics_records(run_dir) == []
        assert list((run_dir / "run_0/checkpoints").iterdir()) == []
        assert mlperf_records(run_dir / "result_0.txt", "run_start")
        assert not mlperf_records(run_dir / "result_0.txt", "eval_accuracy")
