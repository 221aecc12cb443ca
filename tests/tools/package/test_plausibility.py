"""Forged logs, each made from the real ones of results/, are refused with their reason."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_tools.package.own_checks import check_systems
from bert_tools.package.plausibility import CONFIGS
from submissions import change, drop, write_records
from support import REPOSITORY, mlperf_records

SYSTEM = "cpu_2core_pytorch"
RESULTS = f"results/{SYSTEM}/bert"
FORGED = rf"{RESULTS}/result_3\.txt"  # the run from 56,000 of its samples on reaches 0.2693
AT_LINE = rf"{FORGED}, line \d+: "
HOUR_MS = 3_600_000
EVALUATION = ("eval_start", "eval_accuracy", "eval_stop", "tracked_stats")
Records = list[dict[str, Any]]
Forge = Callable[[Records], Records | None]


def rewrite(log: Path, forge: Forge) -> None:
    contents = mlperf_records(log)
    write_records(log, forge(contents) or contents)


def named(contents: Records, key: str) -> Records:
    return [record for record in contents if record["key"] == key]


def samples_of(record: dict[str, Any]) -> int:
    return int(record["metadata"].get("samples_count", 0))


def move_in_time(contents: Records, by_ms: int) -> None:
    for record in contents:
        record["time_ms"] += by_ms


def scale_times(contents: Records, divisor: int) -> None:
    first_ms = contents[0]["time_ms"]
    for record in contents:
        record["time_ms"] = first_ms + (record["time_ms"] - first_ms) // divisor


def scale_throughputs(contents: Records, factor: float) -> None:
    for record in named(contents, "tracked_stats"):
        record["value"]["throughput"] *= factor


def scale_samples(contents: Records, divisor: int) -> None:
    for record in contents:
        if samples_of(record):
            samples = record["metadata"]["samples_count"] // divisor
            record["metadata"].update(samples_count=samples, epoch_num=samples)
    named(contents, "train_samples")[0]["value"] //= divisor


def drop_evaluation(contents: Records, number: int) -> Records:
    samples = samples_of(named(contents, "eval_start")[number])
    return [record for record in contents if samples_of(record) != samples]


def insert_again(contents: Records, keys: tuple[str, ...]) -> Records:
    """The second evaluation's records of these keys stand there twice."""
    last = contents.index(named(contents, "tracked_stats")[1])
    again = [record for record in contents[last - 3 : last + 1] if record["key"] in keys]
    return [*contents[: last + 1], *(record | {} for record in again), *contents[last + 1 :]]


def evaluate_twice(contents: Records) -> Records:
    """The second evaluation stands there again, at the time when it ended."""
    twice = insert_again(contents, EVALUATION)
    last = twice.index(named(twice, "tracked_stats")[1])
    for record in twice[last + 1 : last + 5]:
        record["time_ms"] = twice[last]["time_ms"]
    return twice


def move(contents: Records, key: str, before: str) -> Records:
    """The last record of `key` gets in front of the last one of `before`, with its time."""
    moved, place = named(contents, key)[-1], named(contents, before)[-1]
    rest = [record for record in contents if record is not moved]
    at = next(number for number, record in enumerate(rest) if record is place)
    return [*rest[:at], moved | {"time_ms": place["time_ms"]}, *rest[at:]]


def early_last_evaluation(contents: Records) -> None:
    """The last evaluation and the stop follow the evaluation before at once."""
    samples = samples_of(named(contents, "eval_start")[-1])
    first = next(n for n, record in enumerate(contents) if samples_of(record) == samples)
    move_in_time(contents[first:], contents[first - 1]["time_ms"] - contents[first]["time_ms"])


def set_last(key: str, **members: Any) -> Forge:
    return lambda contents: named(contents, key)[-1].update(members)


def set_first(key: str, **members: Any) -> Forge:
    return lambda contents: named(contents, key)[0].update(members)


def later(key: str, by_ms: int) -> Forge:
    """A record of the end and all after it come later."""
    return lambda contents: move_in_time(contents[contents.index(named(contents, key)[0]) :], by_ms)


def set_metadata(key: str, **members: int) -> Forge:
    return lambda contents: named(contents, key)[1]["metadata"].update(members)


def late_start(contents: Records) -> None:
    for key in ("init_stop", "run_start", "epoch_start", "block_start"):
        named(contents, key)[0]["time_ms"] += 9000


def cut(contents: Records, samples: int) -> Records:
    """The run as if it had ended with the evaluation after so many samples."""
    end = 1 + max(n for n, each in enumerate(contents) if samples_of(each) == samples)
    tail = contents[-5:]
    move_in_time(tail, contents[end - 1]["time_ms"] - tail[0]["time_ms"])
    named(tail, "train_samples")[0]["value"] = samples
    return [*contents[:end], *tail]


def all_new_but_accuracies(contents: Records) -> None:
    scale_times(contents, 2)
    scale_throughputs(contents, 2.0)


def all_new_but_throughputs(contents: Records) -> None:
    for record in named(contents, "eval_accuracy"):
        record["value"] *= 1.0001


def free_evaluations(contents: Records) -> None:
    """Each evaluation begins earlier by its own length, as if training had gone on meanwhile."""
    for start, stop in zip(
        named(contents, "eval_start"), named(contents, "eval_stop"), strict=True
    ):
        move_in_time(contents[contents.index(start) :], start["time_ms"] - stop["time_ms"])


def beside_training(contents: Records) -> None:
    """The log of a run whose evaluations took none of its time; results came 51 steps later."""
    start_ms, per_s, later = named(contents, "run_start")[0]["time_ms"], 701.25, 51 * 32
    for record in contents:
        if record["key"] in ("eval_accuracy", "eval_stop", "tracked_stats"):
            record["time_ms"] = start_ms + round(1000 * (samples_of(record) + later) / per_s)
        elif record["key"] == "eval_start":
            record["time_ms"] = start_ms + round(1000 * samples_of(record) / per_s)
    for record in named(contents, "tracked_stats"):
        samples = samples_of(record) + later
        record["metadata"].update(samples_count=samples, epoch_num=samples)
        record["value"] = {"throughput": per_s}
    for record in contents[-5:]:
        record["time_ms"] = contents[-6]["time_ms"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of this repository's submission that our own checks read, to be spoiled."""
    shutil.copytree(REPOSITORY / RESULTS, tmp_path / RESULTS)
    for name in (f"systems/{SYSTEM}.json", f"{CONFIGS}/cpu_tiny.toml"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def problems_of(tree: Path, *systems: str) -> list[str]:
    return [str(problem) for problem in check_systems(tree, systems or (SYSTEM,))[1]]


def log_of(tree: Path, number: int) -> Path:
    return tree / RESULTS / f"result_{number}.txt"


ALONE: dict[str, tuple[Forge, str]] = {
    "times divided by ten": (
        lambda contents: scale_times(contents, 10),
        AT_LINE + r"1\.2 s since run_start contradict .* 8000 samples took 11\.4 s, and its evalu",
    ),
    "stop before the evaluation": (
        lambda contents: named(contents, "run_stop")[0].update(
            time_ms=named(contents, "eval_accuracy")[-1]["time_ms"] - 1000
        ),
        AT_LINE + r"time runs backwards, by 1\d\d\d ms at 'run_stop'; use the log as the run",
    ),
    "evaluation too early": (
        early_last_evaluation,
        AT_LINE + r"87\.5 s since run_start contradict",
    ),
    "evaluations for free": (
        free_evaluations,
        AT_LINE + r"2.\.. s since run_start contradict .* 16000 samples took",
    ),
    "clock starts late": (late_start, AT_LINE + "2.. s since run_start contradict"),
    "stop much later": (
        later("run_stop", 5000),
        FORGED + r": run_stop comes 5\.0 s after the last .* 2 steps and a second are 1\.1 s",
    ),
    "throughputs raised": (
        lambda contents: scale_throughputs(contents, 1.1),
        AT_LINE + "11.9 s since run_start contradict the log's throughputs",
    ),
    "throughput of zero": (
        set_first("tracked_stats", value={"throughput": 0}),
        AT_LINE + "its throughput is 0",
    ),
    "samples halved": (
        lambda contents: scale_samples(contents, 2),
        AT_LINE + r"11\.9 s since run_start contradict .* 4000 samples took 5\.7 s",
    ),
    "train_samples lowered": (
        set_last("train_samples", value=56000),
        FORGED + ": train_samples is 56000, the last evaluation's 64000",
    ),
    "train_samples in words": (
        set_last("train_samples", value="many"),
        AT_LINE + "train_samples is 'many'",
    ),
    "target reached before": (
        set_last("quality_target", value=0.26),
        AT_LINE + r"the target 0\.26 is reached here, but the run goes on",
    ),
    "first evaluation removed": (
        lambda contents: drop_evaluation(contents, 0),
        AT_LINE + "evaluation 2 comes after 24000 samples, unevenly",
    ),
    "an evaluation removed": (
        lambda contents: drop_evaluation(contents, 4),
        AT_LINE + "evaluation 5 comes after 48000 samples, unevenly",
    ),
    "all evaluations but the last removed": (
        lambda contents: [each for each in contents if samples_of(each) in (0, 64000)],
        rf"{RESULTS}: runs with different 'samples before the first evaluation': 64000, 8000",
    ),
    "evaluation twice": (evaluate_twice, AT_LINE + "16000 samples come after 16000"),
    "throughput twice": (
        lambda contents: insert_again(contents, ("tracked_stats",)),
        AT_LINE + "tracked_stats follows no evaluation",
    ),
    "no throughput at the end": (
        lambda contents: [
            each for each in contents if samples_of(each) != 64000 or each["key"] != "tracked_stats"
        ],
        FORGED + ": does not end with an evaluation and its tracked_stats",
    ),
    "no accuracy": (
        lambda contents: [each for each in contents if each["key"] != "eval_accuracy"],
        AT_LINE + "eval_stop at 8000 samples stands where eval_accuracy belongs",
    ),
    "accuracy of other samples": (
        set_metadata("eval_accuracy", samples_count=16032, epoch_num=16032),
        AT_LINE + "eval_accuracy at 16032 samples stands where eval_accuracy belongs",
    ),
    "epoch unlike samples": (
        set_metadata("eval_accuracy", epoch_num=8000),
        AT_LINE + "eval_accuracy does not give one number as samples_count and epoch_num",
    ),
    "block ends before its evaluation": (
        lambda contents: move(contents, "block_stop", "eval_start"),
        AT_LINE + "'block_stop' stands where an evaluation's record belongs",
    ),
    "initialised after the start": (
        lambda contents: move(contents, "run_start", "init_stop"),
        AT_LINE + "'weights_initialization' stands where init_stop belongs",
    ),
    "starts later": (
        lambda contents: move(contents, "run_start", "eval_start"),
        AT_LINE + "'tracked_stats' stands where init_stop belongs",
    ),
    "accuracy above one": (
        set_first("eval_accuracy", value=1.5),
        AT_LINE + r"eval_accuracy is 1\.5, not a number within 0 \.\. 1",
    ),
    "accuracy is no number": (
        set_first("eval_accuracy", value=float("nan")),
        AT_LINE + r"is no record \(NaN is not JSON\)",
    ),
    "global batch that was not trained": (
        set_last("global_batch_size", value=48),
        AT_LINE + "8000 samples are no multiple of global_batch_size 48",
    ),
    "global batch that ranks cannot share": (
        set_last("global_batch_size", value=25),
        FORGED + ": global_batch_size is 25, which 2 ranks with 1 forwards each cannot share",
    ),
    "another learning rate": (
        set_last("opt_base_learning_rate", value=0.003),
        rf"{RESULTS}: runs with different 'opt_base_learning_rate': 0\.002, 0\.003; make",
    ),
    "another machine's": (
        set_last("submission_platform", value="DGX"),
        rf"{RESULTS}: runs with different 'submission_platform': 'DGX', 'unnamed'; make",
    ),
    "moved to overlap": (
        lambda contents: move_in_time(contents, 30_000),
        rf"{RESULTS}: result_3\.txt and result_4\.txt ran at the same time; run one after the",
    ),
}


def test_real_runs_are_believed(tree: Path) -> None:
    assert problems_of(tree) == []


@pytest.mark.parametrize(("forge", "reason"), ALONE.values(), ids=ALONE)
def test_a_forged_log_is_refused_with_its_reason(forge: Forge, reason: str, tree: Path) -> None:
    rewrite(log_of(tree, 3), forge)
    problems = problems_of(tree)
    assert any(re.match(reason, problem) for problem in problems), problems
    assert all(problem.isprintable() for problem in problems)


def take(tree: Path, source: int, forge: Forge) -> None:
    """result_3 becomes a forged copy of another, under its own seed and an hour after all."""
    (seed,) = mlperf_records(log_of(tree, 3), "seed")
    contents = mlperf_records(log_of(tree, source))
    named(contents, "seed")[0].update(value=seed["value"])
    move_in_time(contents, HOUR_MS)
    write_records(log_of(tree, 3), forge(contents) or contents)


COPIES: dict[str, tuple[Forge, str]] = {
    "moved in time": (lambda _: None, "9 accuracies and 9 throughputs"),
    "faster": (all_new_but_accuracies, "9 accuracies and 0 throughputs"),
    "more accurate": (all_new_but_throughputs, "0 accuracies and 9 throughputs"),
}


@pytest.mark.parametrize(("forge", "shared"), COPIES.values(), ids=COPIES)
def test_a_copy_under_another_seed_is_refused(forge: Forge, shared: str, tree: Path) -> None:
    take(tree, 4, forge)
    (problem,) = problems_of(tree)
    assert problem.startswith(f"{RESULTS}/result_4.txt: {shared} are those of {RESULTS}/result_3.t")


def test_a_log_joined_from_two_is_refused(tree: Path) -> None:
    other = mlperf_records(log_of(tree, 5))

    def join(contents: Records) -> Records:
        half = [record for record in contents if samples_of(record) <= 32000]
        head = half[: 1 + max(n for n, each in enumerate(half) if samples_of(each))]
        tail = other[next(n for n, each in enumerate(other) if samples_of(each) == 40000) :]
        gap_ms = other[other.index(tail[0]) - 1]["time_ms"] - head[-1]["time_ms"]
        move_in_time(tail, -gap_ms)
        return [*head, *tail]

    take(tree, 4, join)
    first, second = problems_of(tree)
    assert "result_4.txt: 4 accuracies and 4 throughputs are those of" in first
    assert "result_5.txt: 5 accuracies and 5 throughputs are those of" in second


def test_a_copy_in_another_system_is_refused(tree: Path) -> None:
    shutil.copytree(tree / "results" / SYSTEM, tree / "results/other")
    shutil.copy(tree / f"systems/{SYSTEM}.json", tree / "systems/other.json")
    problems = problems_of(tree, SYSTEM, "other")
    assert len(problems) == 10
    assert re.match(r"results/other/bert/result_0\.txt: 8 acc.* 8 through.* are those", problems[0])


def test_a_target_needs_a_config_that_has_it(tree: Path) -> None:
    """All ten logs end at a lower target, as if it had been meant."""
    for number in range(10):
        change(log_of(tree, number), "quality_target", value=0.25)
        reached = [
            samples_of(record)
            for record in mlperf_records(log_of(tree, number), "eval_accuracy")
            if record["value"] >= 0.25
        ]
        rewrite(log_of(tree, number), lambda contents, end=reached[0]: cut(contents, end))
    problems = problems_of(tree)
    assert len(problems) == 10
    assert problems[0] == (
        f"{RESULTS}/result_0.txt: quality_target is 0.25, neither the benchmark's 0.72 nor that of "
        "a config with the log's hyper-parameters (0.27 in cpu_tiny.toml); put the config of the "
        f"runs into {CONFIGS}"
    )
    config = tree / CONFIGS / "cpu_tiny.toml"
    lower = config.read_text().replace("target_accuracy = 0.27", "target_accuracy = 0.25")
    config.with_name("cpu_tiny_lower.toml").write_text(lower)
    assert problems_of(tree) == []
    for other in config.parent.iterdir():
        other.write_text(lower.replace("learning_rate = 2e-3", "learning_rate = 1e-3"))
    assert "log's hyper-parameters (there is none); put" in problems_of(tree)[9]


def test_evaluations_beside_training_may_take_no_time(tree: Path) -> None:
    rewrite(log_of(tree, 3), beside_training)
    assert problems_of(tree) == []
    rewrite(log_of(tree, 3), lambda contents: scale_times(contents, 10))
    assert "1.4 s since run_start contradict" in problems_of(tree)[0]


def test_numbers_that_agree_are_believed(tree: Path) -> None:
    """These are the forgeries that docs/start/submission.md calls undetectable."""
    for number in range(10):
        rewrite(log_of(tree, number), all_new_but_accuracies)
    assert problems_of(tree) == []


def test_a_resumed_run_is_refused_for_that_alone(tree: Path) -> None:
    """Its first samples and their time are in another log."""
    for forge in (lambda contents: drop_evaluation(contents, 0), set_last("resumed", value=True)):
        rewrite(log_of(tree, 3), forge)
    problems = [problem for problem in problems_of(tree) if "result_3.txt" in problem]
    assert problems == [
        f"{RESULTS}/result_3.txt: the run was resumed from a checkpoint; use one that was not"
    ]
    drop(log_of(tree, 3), "resumed")
    assert "holds no resumed" in problems_of(tree)[0]
