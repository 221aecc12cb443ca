"""The page of a report: what it shows of runs whole and in parts, and that no file can break it."""

import json
import os
import re
import shutil

import pytest

from mlperf_bert.errors import UserError
from report_pages import checked, page_of
from run_cases import (
    BATCH,
    end_run,
    record,
    records_of,
    write_clock,
    write_environment,
    write_run,
)

TAG = "<script>alert(1)</script><img src=x onerror=alert(2)>"
CHARTS = {
    *("Masked-LM accuracy", "Training loss", "Throughput", "Token throughput", "Time of a step"),
    *("Imbalance", "Gradient norm", "Learning rate", "Peak memory"),
}
SAID = ("step 5 of 20: loss 1.0000, accuracy 0.9999, 1 samples/s",)


def test_other_words_of_the_console_give_the_same_page_and_screen(tmp_path, told):
    """What a run prints is for people: no tool reads it, so that its sentences can be improved."""
    run = write_run(tmp_path / "run", [record(10, 0.5), record(20, 0.99)], said=SAID)
    write_environment(run / "run_0")
    write_clock(run, init_start=1, init_stop=2, run_start=2, run_stop=90)
    console = run / "run_0" / "stdout.log"
    written = console.stat()
    page, screen = page_of(run), told("watch", run, "--once")
    assert "0.9900" in page and "0.9900" in screen
    for words in (b"", b"Quite other words: 0.1234.\n", b"\xff\xfe\x00" * 1000):
        console.write_bytes(words)
        os.utime(console, ns=(written.st_atime_ns, written.st_mtime_ns))
        assert page_of(run) == page
        assert told("watch", run, "--once") == screen


def test_a_run_under_way_has_no_end_and_one_that_was_stopped_says_so(tmp_path):
    run = write_run(tmp_path / "run", [record(1)])
    with (run / "run_0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "sam')
    page = checked(page_of(run))
    assert "still running, or ended by a fault (metrics last written 20" in page.words
    assert "there was no evaluation yet" in page.words and "Time to train" not in page.words
    end_run(run / "run_0", "aborted", "SIGTERM")
    assert "stopped by SIGTERM, can be resumed" in checked(page_of(run)).words
    end_run(run / "run_0", "aborted")
    assert "target missed" in checked(page_of(run)).words


def test_a_loss_that_is_no_number_is_a_gap(tmp_path):
    records = [record(step, loss=None if step == 3 else 2.0) for step in range(1, 6)]
    text = page_of(write_run(tmp_path / "run", records))
    assert checked(text).charts()["Training loss"] == "this run, 4 values, the last 2.000"
    loss = text[text.index("Training loss") :]
    path = re.search(r'<path d="([^"]*)"', loss)
    assert path and path[1].count("M") == 2 and len(re.split("[ML]", path[1])) == 5


def test_a_resumed_run_has_no_time_to_train(tmp_path):
    root = write_run(tmp_path / "run", records_of(), ended="success")
    write_clock(root, run_start=1, run_stop=90)
    assert "Time to train" in checked(page_of(root)).words
    (root / "run_0" / "interrupted").mkdir()
    (root / "run_0" / "interrupted" / "result_0_0.txt").touch()
    page = checked(page_of(root))
    assert "2 attempts" in page.words and "Time to train" not in page.words
    # An attempt that failed before the clock started is no reason, and another run's checkpoint is.
    write_clock(root, run_start=1, run_stop=90, resumed=False)
    assert "Time to train" in checked(page_of(root)).words
    shutil.rmtree(root / "run_0" / "interrupted")
    write_clock(root, run_start=1, run_stop=90, resumed=True)
    assert "Time to train" not in checked(page_of(root)).words


def test_equal_runs_differ_in_nothing(tmp_path):
    runs = [write_run(tmp_path / name, records_of()) for name in "ab"]
    told = "the same settings and the same machine, as far as the files of the runs show."
    assert told in checked(page_of(*runs)).words
    for each in runs:
        write_environment(each / "run_0")
    assert "the same settings and the same machine. Start times" in checked(page_of(*runs)).words
    (runs[0] / "run_0" / "interrupted").mkdir()
    (runs[0] / "run_0" / "interrupted" / "result_0_0.txt").touch()
    last = "the same machine. Only last attempts are compared here, and earlier ones may"
    assert last in checked(page_of(*runs)).words
    (runs[1] / "run_0" / "config.toml").unlink()  # what is not told is not called equal
    assert told in checked(page_of(*runs)).words


def test_the_seeds_that_runs_used_are_compared_also_if_they_were_drawn(tmp_path):
    runs = [write_run(tmp_path / name, records_of()) for name in "ab"]
    for seed, each in enumerate(runs, 101):
        write_environment(each / "run_0", seed=seed)
    page = checked(page_of(*runs))
    assert "Only the seed differs. Start times are not compared." in page.words
    first = page.texts.index("run.seed")
    assert page.texts[first : first + 3] == ["run.seed", "101", "102"]
    fixed = write_run(tmp_path / "c", records_of(), overrides=["run.seed=102"])
    write_environment(fixed / "run_0", seed=102)
    words = checked(page_of(runs[1], fixed)).words
    assert "The runs have the same settings and the same machine." in words


def test_a_change_says_what_it_is_a_percentage_of(tmp_path):
    runs = [
        write_run(tmp_path / name, [record(1, samples_per_s=rate)])
        for name, rate in {"a": 800.0, "b": 600.0}.items()
    ]
    page = checked(page_of(*runs))
    assert "\N{MINUS SIGN}25.0%" in page.texts
    assert "in percent of the first run's value (a)" in page.words
    assert "Clipped gradients or buckets" in page.words and "25%" in page.words


def test_eager_steps_are_counted_for_a_captured_run_only(tmp_path):
    records = records_of(eager_steps=1)
    captured = write_run(tmp_path / "a", records, overrides=['run.step_mode="captured"'])
    page = checked(page_of(captured))
    label = page.texts.index("Eager steps (not captured)")
    assert page.texts[label + 1] == str(len(records))
    assert "Eager steps" not in checked(page_of(write_run(tmp_path / "b", records))).words


def test_a_short_interval_weighs_less_than_a_long_one_in_a_mean(tmp_path):
    records = [record(9, imbalance_tokens=1.0), record(10, imbalance_tokens=2.0)]
    interval = ["run.log_interval_steps=9"]
    run = write_run(tmp_path / "run", records, overrides=interval, ended="success")
    texts = checked(page_of(run)).texts
    assert texts[texts.index("Most tokens, relative to mean rank") + 1].startswith("1.100 ")


def test_more_runs_than_colours_are_told_apart_by_dashes(tmp_path):
    runs = [write_run(tmp_path / f"n{n}", [record(1, 0.1 + n / 100)]) for n in range(10)]
    text = page_of(*runs)
    curves = re.findall(r'<path d="[^"]*" class="([^"]*)"', text[: text.index("Training loss")])
    assert len(set(curves)) == 10


def test_nothing_in_a_hostile_run_becomes_markup(tmp_path):
    changed = [f"mlperf.submission_org={json.dumps(TAG)}"]
    name = "script><b onclick=x>'\"&"  # of two, so that their parents' are shown too
    other = write_run(tmp_path / "q<" / name, records_of())
    root = write_run(tmp_path / "p<" / name, records_of(), overrides=changed)
    end_run(root / "run_0", "aborted", f'"{TAG}')
    facts = {
        f"device{TAG}": TAG,
        "device": f"'{TAG}",
        "packages": {f'"{TAG}': f"</td>{TAG}\x1b[2J\u202eabc\x00<!--"},
    }
    write_environment(root / "run_0", **facts)
    page = checked(page_of(root, other))
    assert page.words.count(TAG) >= 6
    assert {f"{parent}</{name}/run_0" for parent in "pq"} <= set(page.texts)
    assert r"\x1b[2J\u202eabc\x00<!--" in page.words


def test_a_file_that_is_wrong_is_refused_in_a_line(tmp_path):
    run = write_run(tmp_path / "run", records_of(), ended="success") / "run_0"
    for name, contents in (
        ("environment.json", "{"),
        ("config.toml", "a = "),
        ("outcome.json", '{"schema_version": 1, "seconds": 1.0, "status": "fine"}'),
    ):
        path = run / name
        before = path.read_text("utf-8") if path.exists() else None
        path.write_text(contents, encoding="utf-8")
        with pytest.raises(UserError, match=re.escape(name)):
            page_of(run)
        path.unlink() if before is None else path.write_text(before, encoding="utf-8")


def test_a_long_run_is_a_small_page_that_keeps_its_peaks(tmp_path):
    records = [record(step, loss=3 + step % 7) for step in range(1, 8001)]
    records[4937]["loss"] = 99.5
    text = page_of(write_run(tmp_path / "run", records))
    assert len(text.encode()) < 1_000_000
    checked(text)
    drawn = re.search(r'<path d="(M[^"]*)"', text[text.index("Training loss") :])
    assert drawn and re.fullmatch(r"M[\d.]+ [\d.]+(?:L[\d.]+ [\d.]+)+", drawn[1])
    points = [tuple(map(float, each.split())) for each in re.split("[ML]", drawn[1])[1:]]
    assert len(points) < 2000 and points[0][0] < 1 and points[-1][0] == 1000
    peak = min(points, key=lambda point: point[1])  # the highest is the nearest to the top
    assert peak[0] == pytest.approx(1000 * 4938 / 8000, abs=0.1)
    assert f"{8000 * BATCH:,}" in text
