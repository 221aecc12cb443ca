"""`report doctor` on made-up runs: every known symptom is named, and what is well is not."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_cases import (
    BATCH_16K,
    BATCH_448,
    GOOD_448,
    PUBLISHED,
    Told,
    log_line,
    log_of,
    read_only,
    record,
    records_16k,
    records_448,
    write_run,
)

from bert_tools.report.doctor import Diagnosis, diagnose
from mlperf_bert.data.index import Baseline

EVERY_20 = range(20, 180, 20)


def diagnosed(
    directory: Path, config: Path, records: Sequence[Mapping[str, Any]], **more: Any
) -> Diagnosis:
    return diagnose(read_only(write_run(directory / "run", config, records, **more)))


def names(diagnosis: Diagnosis) -> list[str]:
    return [cause.name for cause in diagnosis.causes]


def test_the_published_curve_is_on_track_at_every_point(tmp_path: Path) -> None:
    for upto in range(1, len(PUBLISHED) + 1):
        found = diagnosed(tmp_path / str(upto), BATCH_16K, records_16k(PUBLISHED[:upto]))
        assert (found.verdict.kind, names(found), found.slowness) == ("on track", [], ())
        assert found.exit_status == 0


def test_a_curve_is_judged_by_how_late_it_is(tmp_path: Path) -> None:
    for times, kind in ((1.1, "on track"), (1.3, "behind"), (2.0, "off")):
        late = [(round(times * step), accuracy) for step, accuracy in PUBLISHED[:2]]
        found = diagnosed(tmp_path / kind, BATCH_16K, records_16k(late))
        assert found.verdict.kind == kind


def test_without_a_known_cause_the_hyper_parameters_are_named(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, BATCH_16K, records_16k([(20, 0.36), (80, 0.40), (150, 0.50)]))
    assert (found.verdict.kind, names(found)) == ("off", ["hyper_parameters"])
    assert "learning rate 0.000392994" in found.causes[0].evidence


@pytest.mark.parametrize(
    ("accuracies", "share", "kind"),
    [
        (GOOD_448, 1.0, "on track"),
        (GOOD_448, 1.3, "behind"),
        (GOOD_448, 1.8, "off"),
        (GOOD_448[:-1], 0.9, "on track"),
        (GOOD_448[:-4], 1.0, "on track"),
        (GOOD_448[:3], 0.9, "behind"),
        ((0.45, 0.5, 0.55, 0.58), 0.9, "off"),
        (GOOD_448[:-1], 1.7, "off"),
        (GOOD_448[:2], 0.3, "cannot be judged"),
    ],
)
def test_without_a_curve_reference_convergence_points_judge(
    accuracies: Sequence[float], share: float, kind: str, tmp_path: Path
) -> None:
    found = diagnosed(tmp_path, BATCH_448, records_448(accuracies, share))
    assert found.verdict.kind == kind


def flat(accuracy: float, **values: Any) -> list[dict[str, Any]]:
    """An accuracy that stays where it is, in small steps up and down."""
    wobbling = [(step, accuracy + 0.002 * (step // 20 % 2)) for step in EVERY_20]
    return records_16k(wobbling, **values)


DECISIVE = {
    "repeated_samples": flat(0.625),
    "stays_at_initial": flat(0.341),
    "no_learning_rate": flat(0.341, learning_rate=0.0),
    "other_vocabulary": flat(0.001),
    "other_held_out_set": flat(0.21, loss=0.5),
}


@pytest.mark.parametrize("name", DECISIVE)
def test_a_known_symptom_makes_a_run_off(name: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, BATCH_16K, DECISIVE[name])
    assert found.verdict.kind == "off" and found.exit_status == 1
    assert name in names(found)[:2]
    if name != "no_learning_rate":  # which stays at the initial accuracy as well
        assert names(found)[0] == name
    assert all(cause.evidence and cause.remedy for cause in found.causes)


def test_what_a_log_says_cannot_drive_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    late = [(step, 0.5) for step in range(2000, 2400, 100)]
    path.write_text(log_line("opt_name", "\x1b[2J\nadamw") + log_of(late, 16_384))
    lines = diagnose(read_only(path)).lines()
    assert any(r"optimizer \x1b[2J\nadamw" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_random_weights_are_named_where_the_benchmark_wants_a_checkpoint(tmp_path: Path) -> None:
    loss = math.log(30522)
    low = records_16k([(1, 0.0001), (20, 0.05)], loss=loss)
    found = diagnosed(tmp_path, BATCH_16K, low, initial_weights="random")
    assert names(found)[0] == "not_initial"
    assert found.causes[0].evidence.endswith(
        "the first loss is 10.33, that of a guess 10.33; the log says random weights"
    )


def test_a_success_below_the_target_is_one_that_was_compared_wrongly(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, BATCH_16K, records_16k([(20, 0.34)]), ended="success")
    assert names(found)[0] == "false_success" and found.verdict.kind == "off"


SLOW = {
    "throughput_drop": [{"samples_per_s": 1000.0 - 20 * n} for n in range(12)],
    "slow_rank": [{"slowest_over_median": 2.0 + 0.01 * n} for n in range(12)],
    "waits_for_data": [{"wait_ms": 20.0 + n} for n in range(12)],
}


@pytest.mark.parametrize("name", SLOW)
def test_slowness_is_told_and_leaves_the_verdict(name: str, tmp_path: Path) -> None:
    records = [record(step, 16_384, None, **each) for step, each in enumerate(SLOW[name], 1)]
    records.append(record(20, 16_384, 0.36, **SLOW[name][-1]))
    found = diagnosed(tmp_path, BATCH_16K, records)
    assert [cause.name for cause in found.slowness] == [name]
    assert (found.verdict.kind, names(found)) == ("on track", [])


def test_a_small_model_is_judged_by_its_symptoms_alone(tiny_config: Path, tmp_path: Path) -> None:
    low = [record(step, 16, 0.05, loss=5.0) for step in range(10, 60, 10)]
    run = read_only(write_run(tmp_path / "run", tiny_config, low))
    assert diagnose(run).verdict.kind == "cannot be judged" and diagnose(run).exit_status == 3
    guess = Baseline(
        context_free_accuracy=0.13, mask_only_accuracy=0.05, masked_tokens=5_000, mask_inputs=4_000
    )
    assert names(diagnose(run, guess)) == ["stays_at_guess"]
    reached = [record(10, 16, 0.995)]
    assert diagnosed(tmp_path / "b", tiny_config, reached).verdict.kind == "on track"
    # Nor can one of any model without an evaluation.
    assert diagnosed(tmp_path / "c", BATCH_16K, [record(1, 16_384, None)]).exit_status == 3


def test_anybodys_log_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    cases: tuple[tuple[Sequence[tuple[int, float]], str | None, str, list[str]], ...] = (
        (PUBLISHED, "success", "on track", []),
        ([(20, 0.3409)], "success", "off", ["false_success"]),
        ([(step, 0.625) for step in EVERY_20], None, "off", ["repeated_samples"]),
    )
    for points, status, kind, causes in cases:
        path.write_text(log_of(points, 16_384, status), encoding="ascii")
        found = diagnose(read_only(path))
        assert (found.verdict.kind, names(found)) == (kind, causes)
    # One that does not say its target cannot be judged.
    text = log_line("max_sequence_length", 128) + log_of([(20, 0.27)], 16, "success")
    path.write_text(text, encoding="ascii")
    found = diagnose(read_only(path))
    assert (found.verdict.kind, names(found)) == ("cannot be judged", [])


def test_what_is_printed_and_the_exit_status(tmp_path: Path, told: Told) -> None:
    good = write_run(tmp_path / "good", BATCH_16K, records_16k(PUBLISHED), ended="success")
    assert told("report", "doctor", good).splitlines() == [
        f"{good}/run_0: on track",
        "  reached 0.72 after 2,932,736 samples, 1.01 times the 2,916,352 published for this batch",
    ]
    stuck = write_run(tmp_path / "stuck", BATCH_16K, flat(0.625))
    words = told("report", "doctor", stuck, status=1)
    assert ": off\n" in words and "     do: look for duplicates: mlperf_bert verify" in words
    found = json.loads(told("report", "doctor", stuck, "--json", status=1))
    assert (found["schema_version"], found["verdict"]) == (1, "off")
    assert found["causes"][0]["name"] == "repeated_samples" and found["slowness"] == []


def test_the_guess_comes_from_the_data(
    tmp_path: Path, tiny_config: Path, synthetic_data: Path, told: Told
) -> None:
    low = [{**each, "mlm_accuracy": 0.01, "loss": 5.0} for each in records_16k(PUBLISHED)]
    run = write_run(tmp_path / "run", tiny_config, low)
    assert "stays_at_guess" in told(
        *("report", "doctor", run, "--data", synthetic_data, "--json"), status=1
    )


@pytest.mark.parametrize(
    ("accuracies", "target", "kind", "words"),
    [
        ((0.1, 0.2, 0.3), "0.9", "cannot be judged", "1.50 x the context-free guess; the target"),
        ((0.1, 0.2, 0.3), "0.9", "cannot be judged", "rises: train longer, by --set run.max_steps"),
        ((0.1, 0.1, 0.1), "0.9", "behind", "look at optim.learning_rate, and at the data"),
        ((0.07,), "none", "behind", "has no target. One evaluation does not show if"),
        ((0.3, 0.3, 0.3), "none", "on track", "It rises no more: a larger model"),
    ],
)
def test_where_no_curve_fits_the_guess_and_the_last_evaluations_speak(
    accuracies: Sequence[float],
    target: str,
    kind: str,
    words: str,
    tiny_config: Path,
    tmp_path: Path,
) -> None:
    records = [record(10 * step, 16, each) for step, each in enumerate(accuracies, 1)]
    write_run(
        tmp_path,
        tiny_config,
        records,
        overrides=[f"eval.target_accuracy={target}"],
        ended="aborted",
    )
    said = "12:00:00 no target; the best context-free guess 0.2000 (9 held-out masked tokens)\n"
    (tmp_path / "run_0/stdout.log").write_text(said)
    verdict = diagnose(read_only(tmp_path)).verdict
    assert verdict.kind == kind and words in verdict.why


def test_what_holds_no_run_is_one_line(tmp_path: Path, told: Told) -> None:
    for kind in ("page", "doctor"):
        told("report", kind, tmp_path, status=2)
