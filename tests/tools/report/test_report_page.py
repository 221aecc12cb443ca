"""The page of a report: what it shows of runs whole and in parts, and that no file can break it."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_cases import (
    BATCH_16K,
    BATCH_448,
    PUBLISHED,
    end_run,
    log_line,
    log_of,
    record,
    records_16k,
    records_448,
    write_run,
)

from report_pages import checked, page_of

TAG = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def titles(values: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The names of the curves of each chart."""
    return [[each["label"] for each in chart["series"]] for chart in values]


def write_environment(run: Path, **facts: Any) -> None:
    whole = {"schema_version": 1, "device": "cpu", "world_size": 2, "commit": "0a1b2c", **facts}
    (run / "environment.json").write_text(json.dumps(whole), encoding="utf-8")


def test_a_whole_run(tmp_path: Path) -> None:
    records = [
        record(step, 16_384, accuracy, clipped_fraction=0.25, memory_bytes=3 * 2**30)
        for step, accuracy in PUBLISHED
    ]
    run = write_run(tmp_path / "run", BATCH_16K, records, ended="success") / "run_0"
    write_environment(run, packages={"torch": "2.13.0"})
    clock = {"init_start": 10, "init_stop": 13, "run_start": 13, "eval_start": 20, "eval_stop": 22}
    log = "".join(log_line(key, None, at) for key, at in clock.items())
    log += log_line("run_stop", None, 113, status="success")
    (tmp_path / "run" / "result_0.txt").write_text(log, encoding="ascii")
    page = checked(page_of(tmp_path / "run"))
    assert {"100.0 s", "3.0 s", "2.0 s", "0.7200", "2,932,736", "25 %"} <= {
        text.strip() for text in page.texts
    }
    assert "2 ranks on cpu" in page.words and "0a1b2c" in page.words and "2.13.0" in page.words
    assert "target reached" in page.words and "on track" in page.words
    # 179 steps of 100 ms are 17.9 s of the 100 on the clock; 2 s were evaluations.
    assert "steps 17.9 s (17.4 %)" in page.words and "rest 80.1 s (77.8 %)" in page.words
    assert "skipped steps: none" in page.words


def test_published_curves_of_the_same_batch_lie_beside(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", BATCH_16K, records_16k(PUBLISHED[:2]))
    page = checked(page_of(run))
    curves = {each["label"]: each for each in page.values[0]["series"]}
    names = ["published v1.1 x 1024", "published v2.0 x 1024", "published v2.0 x 1368"]
    assert sorted(curves) == [*names, "this run"]
    assert curves["this run"]["x"] == [20 * 16_384, 80 * 16_384]
    assert curves["this run"]["y"] == [0.36, 0.5]
    assert curves[names[0]]["y"][0] == pytest.approx(0.341, abs=5e-4)  # of the checkpoint
    assert "Samsung" in page.words


def test_elsewhere_the_reference_convergence_point_is_marked(tmp_path: Path) -> None:
    page = checked(page_of(write_run(tmp_path / "run", BATCH_448, records_448([0.5, 0.6], 0.5))))
    assert titles(page.values)[0] == ["this run"]
    assert "reference convergence point" in page.words
    assert page.values[0]["high"] == pytest.approx(2_414_421, rel=0.001)


def remove(*names: str) -> Callable[[Path], Path]:
    def removed(root: Path) -> Path:
        for name in names:
            (root / name).unlink()
        return root

    return removed


@pytest.mark.parametrize(
    ("make", "said", "num_charts"),
    [
        (remove(), [], 5),
        (remove("result_0.txt"), ["there is no MLPerf log"], 5),
        (remove("run_0/config.toml"), ["there is no config.toml"], 5),
        (remove("run_0/metrics.jsonl"), ["there is no metrics.jsonl", "no evaluation yet"], 0),
        (
            remove("run_0/metrics.jsonl", "run_0/config.toml", "run_0/outcome.json"),
            ["there is no metrics.jsonl", "there is no config.toml", "no end recorded"],
            0,
        ),
        (lambda root: root / "result_0.txt", ["there is no metrics.jsonl", "no evaluation yet"], 0),
        (lambda root: root / "run_0", [], 5),
    ],
)
def test_what_is_not_there_is_said(
    make: Callable[[Path], Path], said: Sequence[str], num_charts: int, tmp_path: Path
) -> None:
    root = write_run(tmp_path / "run", BATCH_16K, records_16k(PUBLISHED), ended="success")
    page = checked(page_of(make(root)))
    assert [words for words in said if words not in page.words] == []
    assert len(page.values) == num_charts  # accuracy, loss, throughput, step, learning rate
    assert "there is no environment.json" in page.words


def test_a_log_of_anybodys_has_its_accuracies(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    samples = log_line("train_samples", 5) + log_line("train_samples", 7777)
    path.write_text(log_of(PUBLISHED, 16_384, "success") + samples, encoding="ascii")
    page = checked(page_of(path))
    assert page.values[0]["series"][-1]["y"] == [accuracy for _, accuracy in PUBLISHED]
    assert "target reached" in page.words and "there is no metrics.jsonl" in page.words
    lines = [text.strip() for text in page.texts]
    assert lines[lines.index("Samples trained") + 1] == "7,777"  # of the last record that tells


def test_a_run_under_way_has_no_end_and_one_that_was_stopped_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", BATCH_16K, [record(1, 16_384, None)])
    with (run / "run_0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "sam')
    page = checked(page_of(run))
    assert "no end recorded: under way, or ended by a fault; last written 20" in page.words
    assert "there is no evaluation yet" in page.words and "Time to train" not in page.words
    end_run(run / "run_0", "aborted", "SIGTERM")
    assert "stopped by SIGTERM, can be resumed" in checked(page_of(run)).words


def test_a_loss_that_is_no_number_is_a_gap_and_said(tmp_path: Path) -> None:
    records = [record(step, 16_384, None, loss=None if step == 3 else 2.0) for step in range(1, 6)]
    text = page_of(write_run(tmp_path / "run", BATCH_16K, records))
    page = checked(text)
    assert "the loss is no number in 1 of 5 records, first at step 3" in page.words
    loss = text[text.index("Training loss") :]
    path = re.search(r'<path d="([^"]*)"', loss)
    assert path and path[1].count("M") == 2 and len(re.split("[ML]", path[1])) == 5


def test_a_resumed_run_has_no_time_to_train_and_says_where_it_went_on(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", BATCH_16K, records_16k(PUBLISHED), ended="success")
    log = log_line("resumed", True, 0, step=100, samples=1_638_400)
    log += log_line("run_start", None, 1) + log_line("run_stop", None, 90, status="success")
    (root / "result_0.txt").write_text(log, encoding="ascii")
    (root / "run_0" / "interrupted").mkdir()
    first = root / "run_0" / "interrupted" / "result_0_0.txt"
    first.write_text(log_line("resumed", False) + log_line("global_batch_size", 16_384))
    page = checked(page_of(root))
    assert "2 attempts; resumed at 1,638,400 samples" in page.words
    assert "Time to train" not in page.words and "Where the time went" not in page.words
    assert "resumed" in page.texts  # the mark in the charts


def test_runs_side_by_side(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", BATCH_16K, records_16k(PUBLISHED))
    slow = records_16k(PUBLISHED[:3], samples_per_s=750.0)
    changed = ["optim.learning_rate=1e-3", 'optim.name="lamb"']
    second = write_run(tmp_path / "second", BATCH_16K, slow, overrides=changed)
    page = checked(page_of(first, second))
    assert titles(page.values)[1] == ["first", "second"]  # of the loss
    lines = [text.strip() for text in page.texts]
    differs = lines[lines.index("What differs") : lines.index("Curves")]
    assert "optim.learning_rate" in differs and "optim.name" in differs
    assert "optim.beta_1" not in differs and "lamb" in differs
    # 1,000 and 750 samples/s
    row = lines[lines.index("Throughput, median") :][:4]
    assert row == [
        "Throughput, median",
        "1,000 samples/s",
        "\N{MINUS SIGN}25.0 %",
        "750.0 samples/s",
    ]


def test_equal_runs_differ_in_nothing(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, BATCH_16K, records_16k(PUBLISHED)) for name in "ab"]
    told = "No setting and no machine does, as far as the files of the runs tell them."
    assert told in checked(page_of(*runs)).words
    for each in runs:
        write_environment(each / "run_0")
    assert "No setting and no machine does. Start times" in checked(page_of(*runs)).words


def test_what_a_log_does_not_tell_is_not_called_equal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", BATCH_16K, records_16k(PUBLISHED))
    path = tmp_path / "theirs.txt"
    path.write_text(log_of(PUBLISHED, 8192), encoding="ascii")
    words = checked(page_of(run, path)).words
    assert "All others are equal, as far as the files of the runs tell them." in words
    both = write_run(tmp_path / "both", BATCH_16K, [], overrides=["clip.max_norm=2.0"])
    for each in (run, both):
        write_environment(each / "run_0")
    assert "All others are equal. Start times" in checked(page_of(run, both)).words


def test_nothing_in_a_hostile_run_becomes_markup(tmp_path: Path) -> None:
    changed = [f"mlperf.submission_org={json.dumps(TAG)}"]
    name = "script><b onclick=x>'\"&"  # of two, so that their parents' are shown too
    directory = tmp_path / "p<" / name
    other = write_run(tmp_path / "q<" / name, BATCH_16K, records_16k(PUBLISHED))
    root = write_run(directory, BATCH_16K, records_16k(PUBLISHED), overrides=changed)
    end_run(root / "run_0", "aborted", f'"{TAG}')
    facts = {f"device{TAG}": TAG, "device": f"'{TAG}", "packages": {f'"{TAG}': f"</td>{TAG}"}}
    write_environment(root / "run_0", **facts)
    (root / "run_0" / "stdout.log").write_text(f"</script>{TAG}\n\x1b[2J\u202eabc\x00<!--\n")
    log = log_line("opt_name", TAG) + log_line("global_batch_size", 16_384)
    (tmp_path / f"{'x' * 20}<script>.txt").write_text(log, encoding="ascii")
    hostile = next(tmp_path.glob("*.txt"))
    page = checked(page_of(root, other, hostile))
    assert page.words.count(TAG) >= 6
    labels = {each["label"] for each in page.values[1]["series"]}
    assert labels == {f"{parent}</{name}/run_0" for parent in "pq"} and labels <= set(page.texts)
    assert r"\x1b[2J\u202eabc\x00<!--" in page.words
    assert f"{'x' * 20}<script>.txt" in page.words


def test_a_long_run_is_a_small_page_that_keeps_its_peaks(tmp_path: Path) -> None:
    keys = ("tokens_per_s", "imbalance_tokens", "imbalance_cost", "idle_fraction", "grad_norm")
    records = [
        record(
            step,
            448,
            0.5 if step % 1000 == 0 else None,
            loss=99.5 if step == 12_345 else 3 + (step * 7919 % 1000) / 1000,
            **{key: 1 + (step * 104_729 % 997) / 997 for key in (*keys, "clipped_fraction")},
        )
        for step in range(1, 20_001)
    ]
    text = page_of(write_run(tmp_path / "run", BATCH_448, records))
    assert len(text.encode()) < 2_000_000
    loss = checked(text).values[1]["series"][0]
    assert max(loss["y"]) == 99.5 and loss["x"][loss["y"].index(99.5)] == 12_345 * 448
    assert loss["x"][0] == 448 and loss["x"][-1] == 20_000 * 448
    assert len(loss["x"]) < 2_000
    drawn = re.search(r'<path d="(M[^"]*)"', text[text.index("Training loss") :])
    assert drawn and re.fullmatch(r"M[\d.]+ [\d.]+(?:L[\d.]+ [\d.]+)+", drawn[1])
    assert drawn[1].count("L") == len(loss["x"]) - 1
