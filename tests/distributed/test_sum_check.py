"""The all-reduce of known sums: exactly right on real ranks, and one wrong number ends the run.

As a script it is a command in which rank 1 gets one wrong number from its first all-reduce.
"""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked_ranks import run_ranks
from mlperf_bert.__main__ import entry, main
from mlperf_bert.distributed import sum_check
from mlperf_bert.distributed.launch import RankInfo, read_rank_info
from support import mlperf_records, sets_of

MISTAKE, LOST = 2, 70
WRONG = r"gloo: the all-reduce computed wrong sums on rank 1 on \S+; look for a broken GPU, .*"
RIGHT = (
    r"all-reduce: 3 ranks with gloo over \S+: all sums are exact, bus bandwidth [\d.]+ GB/s "
    r"\(64 MiB in [\d.]+ ms\)"
)


def falsify_the_first_sum():
    """Let the next all-reduce of this process add one to its last number."""
    usual = dist.all_reduce

    def falsified(numbers, *arguments, **options):
        found = usual(numbers, *arguments, **options)
        numbers[-1] += 1
        dist.all_reduce = usual
        return found

    dist.all_reduce = falsified


def the_only_error(printed):
    assert "Traceback" not in printed
    (error,) = re.findall(r"^mlperf_bert: error: (.*)$", printed, re.MULTILINE)
    return str(error)


@pytest.mark.parametrize("command", ["train", "network-test"])
def test_a_wrong_sum_ends_the_command(command, tiny_config, synthetic_data, tmp_path):
    words = [command, "--config", tiny_config]
    if command == "train":
        words += ["--data", synthetic_data, "--run-dir", tmp_path]
        words += sets_of("parallel.ranks_per_node=2", "parallel.local_batch_size=8")
    statuses, printed = run_ranks(Path(__file__), words, 2)
    assert statuses == [MISTAKE, MISTAKE], printed
    assert re.fullmatch(WRONG, the_only_error(printed))
    assert "exactly right" not in printed
    if command == "train":
        assert mlperf_records(tmp_path / "result_0.txt", "run_start") == []


def test_right_sums_are_one_line_with_the_rate(tiny_config):
    words = ("network-test", "--config", tiny_config)
    statuses, printed = run_ranks("mlperf_bert", words, 3)
    assert (statuses, len(printed.splitlines())) == ([0, 0, 0], 1), printed
    assert re.fullmatch(RIGHT, printed.strip())


def test_one_rank_has_nothing_to_sum(tiny_config, capsys):
    alone = RankInfo(0, 1, 0, 1, 0, "single")
    assert sum_check.check_sums(alone, torch.device("cpu")) == 0.0
    assert main(["network-test", "--config", str(tiny_config)]) == 0
    assert (
        capsys.readouterr().out
        == "all-reduce: there is only one rank, so there is nothing to sum\n"
    )


def test_sums_of_very_many_ranks_are_whole_numbers_of_fp32():
    largest = sum(map(sum_check._factor, range(14_000))) * sum_check._LARGEST_NUMBER
    assert largest < 2**24


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "rank 0 on node0: other ranks did not answer within 0.5 s"),
        (1, "rank 1: cannot reach rank 0 at "),
    ],
)
def test_a_rank_that_never_comes_is_one_line(rank, said, port, tiny_config, monkeypatch, capfd):
    one_of_two_tasks = {
        **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
        **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": f"node{rank}"},
        **{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)},
    }
    for name, value in one_of_two_tasks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mlperf_bert.distributed.session.GRACE", timedelta(0))
    command = ["network-test", "--config", str(tiny_config), "--set", "run.hang_timeout_s=0.5"]
    assert main(command) == LOST
    printed = capfd.readouterr()
    assert printed.out == ""
    assert the_only_error(printed.err).startswith(said)


if __name__ == "__main__":
    if read_rank_info().rank == 1:
        falsify_the_first_sum()
    entry()
