"""Raw MLPerf logs: whose they are, MLPerf's score, and what cannot be read is named."""

import json
import os
from pathlib import Path

import pytest

from bert_tools.common.log_reader import TOKEN, Record, RunLog
from bert_tools.plan.entries import _evaluated_samples, read_results
from log_trees import write_run, write_system
from support import REPOSITORY

TIMES = [10.0, 19.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 1.0]
MEAN_OF_EIGHT = (10 + 12 + 13 + 14 + 15 + 16 + 17 + 18) / 8


def only(root):
    (entry,), skipped = read_results(root)
    assert not skipped
    return entry


def no_entry(root, words):
    """What is skipped of a tree without a whole entry, whose last part says these words."""
    entries, skipped = read_results(root)
    assert entries == [] and words in str(skipped[-1])
    return skipped


def test_an_entry_of_ten_runs(tmp_path):
    root = tmp_path / "training_results_v2.1" / "Acme"
    directory = write_system(root, "acme_n2", minutes=TIMES, samples=2_500_000, nodes=2)
    (directory.parent / "resnet").mkdir()
    (directory.parent / "resnet" / "result_0.txt").write_text("no log at all\n")
    entry = only(tmp_path)
    assert (entry.system, entry.accelerators) == ("acme_n2", 16)
    assert (entry.submitter, entry.division, entry.accelerator) == ("Acme", "closed", "Example A1")
    assert entry.time_min == pytest.approx(MEAN_OF_EIGHT)
    assert entry.samples == 2_500_000
    assert entry.seq_per_s == pytest.approx(sum(2.5e6 / 60 / each for each in TIMES) / 10)
    assert entry.global_batch_size == 448
    assert entry.round == "2.1"


def fail(path, how):
    if how == "aborted":
        path.unlink()
        write_run(path, 5.0, 1_000_000, status="aborted")
    elif how == "resumed":
        path.unlink()
        write_run(path, 5.0, 1_000_000, resumed=True)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        path.write_text(f'{TOKEN}{{"key": "run_start", "time_ms": 1e999}}\n')


@pytest.mark.parametrize("how", ["aborted", "cut", "resumed", "hostile"])
def test_one_failed_run_is_the_slowest_and_two_leave_no_score(tmp_path, how):
    directory = write_system(tmp_path, "acme", minutes=TIMES, samples=2_500_000)
    fail(directory / "result_4.txt", how)  # that of 14 minutes
    (entry,), skipped = read_results(tmp_path)
    assert entry.time_min == pytest.approx((19 + 10 + 12 + 13 + 15 + 16 + 17 + 18) / 8)
    names = [each.args[0].partition(",")[0] for each in skipped]
    assert names == ([] if how == "aborted" else [str(directory / "result_4.txt")])
    fail(directory / "result_7.txt", how)
    no_entry(tmp_path, f"{directory}: 2 of 10 runs failed or have an unreadable log")


def test_few_runs_have_a_mean_but_not_of_failed_ones_other_ranks_or_absurd_counts(tmp_path):
    directory = write_system(tmp_path, "acme", minutes=[3.0, 5.0], samples=1000, says_ranks=True)
    (tmp_path / "systems" / "acme.json").write_text('{"number_of_nodes": "7"}')
    entry = only(tmp_path)  # the logs' own ranks come before the description
    assert (entry.accelerators, entry.time_min) == (8, pytest.approx(4.0))
    write_run(directory / "result_2.txt", 4.0, 1000, ranks=64)
    no_entry(tmp_path, "different numbers of ranks, 8 and 64")
    (directory / "result_2.txt").unlink()
    write_run(directory / "result_2.txt", 4.0, 10**15, ranks=8)
    no_entry(tmp_path, "more than 1,000,000,000,000 training samples")
    (directory / "result_2.txt").unlink()
    fail(directory / "result_1.txt", "aborted")
    no_entry(tmp_path, "1 of 2 runs failed or have an unreadable log")


def test_without_a_number_of_accelerators_there_is_no_entry(tmp_path):
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    path = tmp_path / "systems" / "acme.json"
    for count in ("0", "-8", "8.5", "1e3", None, ["8"], "8" * 5000):
        path.write_text(json.dumps({"number_of_nodes": "1", "accelerators_per_node": count}))
        no_entry(tmp_path, "the number of accelerators is not known")
    path.write_text("{")
    no_entry(tmp_path, str(path))


def test_logs_that_say_another_benchmark_are_left_out_and_named(tmp_path):
    """Where directories do not say it, as in a tree of one's own."""
    directory = write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000, says_ranks=True)
    own = directory.rename(tmp_path / "own")
    assert only(tmp_path).system == "own"
    for path in own.iterdir():
        path.write_text(path.read_text().replace('"value": "bert"', '"value": "resnet"'))
    skipped = no_entry(tmp_path, "")
    assert [each.args[1] for each in skipped[:3]] == ["the benchmark is 'resnet'"] * 3


def test_a_log_that_is_a_link_to_nowhere_a_pipe_or_a_directory_is_named(tmp_path):
    directory = write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    (directory / "result_3.txt").symlink_to("result_3.txt")
    assert len(read_results(tmp_path)[1]) == 1
    os.mkfifo(directory / "result_4.txt")
    (directory / "result_5.txt").mkdir()
    skipped = [Path(each.args[0]).name for each in no_entry(tmp_path, "")]
    assert skipped == ["result_3.txt", "result_4.txt", "result_5.txt", "bert"]


def test_the_law_of_a_tree(tmp_path, asked, told):
    """Three sizes on time = 80 * p^-0.5; samples grow as p^0.25, so throughput does as p^0.75."""
    for nodes in (1, 4, 16):
        size = 8 * nodes
        times, samples = [80 * size**-0.5] * 3, round(1e6 * size**0.25)
        write_system(tmp_path, f"acme_n{nodes}", minutes=times, samples=samples, nodes=nodes)
    broken = tmp_path / "results/broken/bert"
    broken.mkdir(parents=True)
    (broken / "result_0.txt").write_text("no log at all\n")
    answer = asked("law .")
    assert answer["coefficient_minutes"] == pytest.approx(80, rel=1e-3)
    names = ("exponent", "throughput_exponent", "samples_exponent")
    assert [answer[name] for name in names] == pytest.approx([-0.5, 0.75, 0.25], abs=1e-4)
    skipped = [each["name"] for each in answer["skipped"]]
    assert skipped == [str(broken / "result_0.txt"), str(broken)]
    assert f"skipped {broken}/result_0.txt: no line contains" in told("law .")


def test_the_projects_own_runs(told):
    """Ten runs of two ranks: an entry, but no law alone."""
    results = REPOSITORY / "results"
    (entry,), _ = read_results(results)
    assert (entry.system, entry.accelerators) == ("cpu_2core_pytorch", 2)
    assert entry.samples and entry.seq_per_s and entry.time_min
    assert "a single entry, 'unnamed cpu_2core" in told("law", results, status=2)


def test_samples_are_not_epochs():
    """Some logs count epochs in the place where ours counts samples."""

    def samples(*metadata):
        return _evaluated_samples(
            RunLog("log", tuple(Record("eval_accuracy", 0.7, each, 0, 1) for each in metadata))
        )

    assert samples({"epoch_num": 1}) is None
    assert samples({"epoch_num": 2000}, {"epoch_num": 1}) == 2000
    assert samples({"epoch_num": 1, "samples_count": 3000}) == 3000
