"""Questions made of the corpus, and the tables of the engines that learn them."""

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bert_tools.squad.questions import read_questions
from support import load_study, run_study

STUDY, LABEL = "2026-11-27-questions", "pipeline:2@gpipe"
WORDS = [f"{first}{second}" for first in "bcdfgh" for second in ("ab", "ec", "id", "og", "um")]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_study(STUDY, "make_questions")


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study(STUDY, "compare_engines")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of two sentences in random words; some words are no plain ones."""
    draw = random.Random(3)
    (tmp_path / "text").mkdir()
    for name in ("train-0.txt", "eval.txt"):
        documents = [
            "\n".join(" ".join([*draw.sample(WORDS, 14), "x1."]) for _ in range(2))
            for _ in range(30)
        ]
        (tmp_path / "text" / name).write_text("\n\n".join(documents))
    return tmp_path


def test_answers_stand_between_the_words_of_their_questions(
    maker: ModuleType, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "COUNTS", {"train": 80, "dev": 40})
    maker.make(corpus, corpus / "out")
    seen = {}
    for name, count in (("train", 80), ("dev", 40)):
        questions = list(read_questions(corpus / "out" / f"{name}.json"))  # checks every place
        assert len(questions) == count
        seen[name] = {each.context for each in questions}
        without = [each for each in questions if each.is_impossible]
        assert 0.1 < len(without) / count < 0.4
        for each in questions:
            between = each.question.removeprefix("What is between ").removesuffix("?")
            before, after = between.split(" and ")
            if each.is_impossible:
                assert before not in each.context or after not in each.context
            else:
                assert f"{before} {each.answers[0].text} {after}" in each.context
    assert not seen["train"] & seen["dev"]
    first = (corpus / "out" / "train.json").read_bytes()
    maker.make(corpus, corpus / "again")
    assert (corpus / "again" / "train.json").read_bytes() == first


def record(label: str, batch: int, seed: int, rate: float, match: list[float]) -> dict[str, Any]:
    """A run of 400 samples, evaluated after 100, 200, 300 and at its end."""
    points = [
        {"update": (place + 1) * 100 // batch, "exact_match": each}
        for place, each in enumerate(match[:-1])
    ]
    return {
        "part": "whole",
        "label": label,
        "global_batch": batch,
        "microbatches": 2,
        "seed": seed,
        "ranks": 1,
        "samples": 400,
        "samples_per_s": rate,
        "exact_match": match[-1],
        "f1": match[-1],
        "answerable": {"exact_match": 55.0, "questions": 30},
        "unanswerable": {"exact_match": 90.0, "questions": 10},
        "on_the_way": points,
        "bubble": {"measured": 0.25, "formula": 0.2} if "pipeline" in label else None,
        "seconds": {"train": 4.0},
        "cpu_seconds": [2.0],
        "core_wait_seconds": [0.4],
        "first_losses": [3.0, 2.9 if label == "single" else 2.9 + 1e-7],
        "loss_difference": 0.0 if label == "single" else 2e-7,
        "noise_scale": 10.0,
        "plain_noise_scale": 50.0,
    }


def cells(lines: list[str], place: int) -> list[str]:
    return [cell.strip() for cell in lines[place + 2].strip("|").split("|")]


def test_quality_is_interpolated_and_told_with_the_seeds_that_reach_it(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BATCH", 25), ("TARGETS", (50, 60))):
        monkeypatch.setattr(study, name, value)
    short = [record(label, 25, 1, 9, [0]) | {"part": "counts"} for label in ("single", LABEL)]
    runs = [
        *short,
        record("single", 25, 1, 100.0, [25.0, 45.0, 55.0, 65.0]),
        record("single", 25, 2, 100.0, [25.0, 25.0, 45.0, 55.0]),
        record(LABEL, 25, 1, 200.0, [25.0, 45.0, 55.0, 65.0]),
    ]
    assert study.samples_to(runs[2], 50) == pytest.approx(250)
    assert study.samples_to(runs[2], 20) == 100
    assert study.samples_to(runs[3], 60) is None
    quality, rates = study.quality_table(runs), study.rates_table(runs)
    single, pipeline = cells(quality, 0), cells(quality, 1)
    # Of 250 and 350 samples: 300, and 12.706 times their standard error of 50.
    assert (single[6], pipeline[6]) == ("-", "0")
    assert single[7:11] == ["300 ± 635", "350 (1 of 2)", "3.0 ± 6.4", "3.5 (1 of 2)"]
    assert single[-1] == "-" and pipeline[-1] == "1e-07, 2e-07"
    assert pipeline[7:11] == ["250", "350", "1.25", "1.75"]
    longer = [run | {"part": "long"} for run in runs[2:4]]
    # Exact match of 65 and 55, the lesser one, and samples to 50 and to 60 (twice).
    found = cells(study.long_table(longer), 0)
    assert [found[2], *found[6:]] == ["60 ± 64", "55.0", "300 ± 635", *["350 (1 of 2)"] * 2]
    # samples/s, over single, bubble, formula, CPU ms a sample, waited
    assert cells(rates, 1)[2:] == ["200", "2", "25", "20", "5", "10"]


def test_batches_are_told_with_what_the_noise_scale_promised(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BATCH", 50), ("TARGETS", (50, 60))):
        monkeypatch.setattr(study, name, value)
    runs = [
        record("ddp:2", 50, 1, 100.0, [25.0, 45.0, 55.0, 65.0]),
        record("ddp:2", 100, 1, 150.0, [25.0, 25.0, 45.0, 55.0]),
    ]
    large = cells(study.batches_table(runs), 1)
    worth = (50 + 50) / (50 + 100)  # by the noise scale of 50; 250 samples against 350 were needed
    assert large[5] == f"{worth:.4f}" and large[7] == f"{250 / 350:.4f}"
    assert large[9] == f"{150 * worth:.0f}"


def test_the_fastest_count_is_taken(study: ModuleType) -> None:
    rates = {2: (10.0, 12.0), 4: (14.0, 11.0), 8: (9.0, 9.0)}
    short = [
        {"part": "counts", "label": "ddp:2", "microbatches": count, "samples_per_s": rate}
        for count, of_seeds in rates.items()
        for rate in of_seeds
    ]
    assert study.best_counts(short) == {"ddp:2": 4}
    assert "**14 11**" in "\n".join(study.counts_table(short))


def test_a_run_is_recorded_and_not_repeated(
    study: ModuleType,
    maker: ModuleType,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(maker, "COUNTS", {"train": 80, "dev": 40})
    maker.make(corpus, corpus / "out")
    monkeypatch.setattr(study, "RECORDS", tmp_path / "records.jsonl")
    run_dir = tmp_path / "runs" / "counts-single-b32-m2-seed1"
    run_dir.mkdir(parents=True)
    found = dict.fromkeys(study.KEPT, 0) | {"losses": [1.0], "samples_per_s": {"train": 5.0}}
    monkeypatch.setattr("bert_tools.squad.compare.run_jobs", lambda jobs: ([], 0))
    (run_dir / study.RESULT).write_text(json.dumps(found))
    for name, few in {"ENGINES": ("single",), "COUNTS": (2,), "COUNT_SEEDS": (1,)}.items():
        monkeypatch.setattr(study, name, few)
    monkeypatch.setattr(study, "SEEDS", ())  # no whole and no long runs
    words = ["run", "--questions", corpus / "out", "--init-checkpoint", tmp_path]
    assert run_study(study, *words, "--out", tmp_path / "runs") == 0
    assert "1 of 1: counts-single-b32-m2-seed1" in capsys.readouterr().out
    (kept,) = study.read_records()
    assert kept["samples_per_s"] == 5.0 and kept["label"] == "single"
    assert run_study(study, *words, "--out", tmp_path / "runs") == 0
    assert capsys.readouterr().out == ""
    assert len(study.read_records()) == 1
