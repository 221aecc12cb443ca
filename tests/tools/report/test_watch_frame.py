"""A frame: within its size whatever that is, everything promised in it, and printable."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

from run_cases import end_run, tiny, write_watched

from bert_tools.report.watch_frame import frame, status_line
from bert_tools.report.watch_look import Look, Remaining, Watcher
from mlperf_bert.run.outcome import Status

SIZES = [(1, 1), (2, 2), (5, 3), (20, 8), (40, 12), (71, 20), (80, 24), (119, 30), (300, 90)]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\r\n\x00\ud800\u0301" + "\u4e2d" * 50
LOG = ("evaluation at 160 samples: accuracy 0.1000 (0.5 s)", "checkpoint step_00000010: 0.3 MB")


def look_at(run: Path) -> Look:
    return Watcher(run).whole_look()


def running(directory: Path) -> Path:
    records = [tiny(step, 0.05 * step if step % 3 == 0 else None) for step in range(1, 15)]
    write_watched(directory, records, log=LOG)
    return directory


def text_of(look: Look, width: int = 80, height: int = 24, ascii_only: bool = False) -> str:
    lines = frame(look, width, height, "ascii" if ascii_only else "unicode", "the hint")
    return "\n".join(line.plain for line in lines)


def test_a_frame_has_its_size(tmp_path: Path) -> None:
    waiting, started = tmp_path / "none", tmp_path / "started"
    write_watched(started)
    looks = list(map(look_at, (waiting, started, running(tmp_path / "running"))))
    sizes = itertools.product(looks, SIZES, ("unicode", "ascii"))
    for look, (width, height), characters in sizes:
        lines = frame(look, width, height, characters, "the hint")
        assert len(lines) <= height and all(line.cell_len <= width for line in lines)


def test_everything_promised_is_there(tmp_path: Path) -> None:
    text = text_of(look_at(running(tmp_path / "run")))
    for words in (
        *("run/run_0", "running", "14 of 20", " 70%"),
        *("to the last step", "to 0.99", "by its curve"),
        *("800 (median 800)", "20,000", "20.00 ms, wait 0.10 ms"),  # rates
        *("1.050 tokens, idle 4.0%", "3.000 GiB on rank 0", "0 now, 0 in all"),
        *("4.9860", "0.6000 of 0.99", "1.500, clipped 25%", "not measured"),
        *("mlm_accuracy, target 0.99", "224 samples"),
        *("checkpoint step_00000010", "the hint"),
    ):
        assert words in text, words
    assert any("\u2800" < char <= "\u28ff" for char in text)


def test_without_unicode_all_is_ascii(tmp_path: Path) -> None:
    run = running(tmp_path / "r\u00fcn")
    text = text_of(look_at(run), ascii_only=True)
    assert text.isascii() and "*" in text and "----" in text and "r\\xfcn" in text


def test_how_a_run_ended(tmp_path: Path) -> None:
    run = running(tmp_path / "run")
    ends: tuple[tuple[Status, str | None, str], ...] = (
        ("success", None, "ended: target reached"),
        ("aborted", None, "ended: target NOT reached"),
        ("aborted", "SIGTERM", "stopped by SIGTERM"),
        ("aborted", "\x1b]0;owned\x07", r"stopped by \x1b]0;owned\x07"),
    )
    for status, stopped_by, words in ends:
        end_run(run / "run_0", status, stopped_by)
        look = look_at(run)
        text = text_of(look)
        assert look.state == words and words in text and words in status_line(look)
        assert "0:01:01 of training, 20 steps, 320 samples" in text
        for line in (*text.split("\n"), look.state, status_line(look)):
            assert line.isprintable(), ascii(line)


def test_a_target_beyond_the_last_step_is_told(tmp_path: Path) -> None:
    look = look_at(running(tmp_path / "run"))
    for low_s, high_s, words in (
        (60, 120, "to 0.99: 0:01:00 to 0:02:00, by its curve"),
        (60, 900, "to 0.99: 0:01:00 to never (the steps may end), by its curve"),
        (601, 900, "to 0.99: not within its steps, by its curve"),
    ):
        remaining = Remaining(600.0, (low_s, high_s), "its curve", "")
        assert words in text_of(replace(look, remaining=remaining))


def test_alerts_stay_where_there_is_little_room(tmp_path: Path) -> None:
    records = [tiny(step, loss=None, slowest_over_median=2.5) for step in range(1, 15)]
    write_watched(tmp_path / "run", records)
    lines = text_of(look_at(tmp_path / "run"), 60, 6).splitlines()
    assert "2.50 times the median" in lines[1]
    assert lines[2].startswith("step")


def test_no_file_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run\x1b]0;owned\x07\u202e"
    records = [tiny(1), tiny(2, loss=1e299, step_ms=-1e299, grad_norm=1e-299)]
    directory = write_watched(
        run, [*records, tiny(2**62, 0.5, samples=2**62, idle_fraction=-1e200)]
    )
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps({'step': HOSTILE})}\n")
    log = f"{HOSTILE}\nrank 1 on \x1b[31m is slow: {HOSTILE}\n".encode("utf-8", "surrogatepass")
    (directory / "stdout.log").write_bytes(log + b"rank 2 on \x1b[31m is slow: \xff\xfe\n")
    (directory / "outcome.json").write_text(json.dumps({"schema_version": 1, "status": HOSTILE}))
    look = look_at(run)
    for width, height in SIZES:
        for ascii_only in (False, True):
            for line in text_of(look, width, height, ascii_only).split("\n"):
                assert line.isprintable(), ascii(line)
    assert status_line(look).isprintable()
    assert {alert.kind for alert in look.alerts} >= {"file", "slow_rank"}


def test_any_number_is_drawn_and_written(tmp_path: Path) -> None:
    keys = ("learning_rate", "samples_per_s", "tokens_per_s", "imbalance_tokens", "idle_fraction")
    keys += ("clipped_fraction", "grad_norm", "memory_bytes", "step_ms", "wait_ms", "loss")
    steps = [1, 5, 2**60, 2**61, 2**62]
    for number in (1e299, -1e299, 1e-299, 0.0, 2**62):
        values = {**dict.fromkeys(keys, number), "slowest_over_median": number}
        run = tmp_path / str(number)
        write_watched(run, [tiny(step, 0.1 + step / 2**64, **values) for step in steps])
        json.dumps(look_at(run).as_json(), allow_nan=False)
        for line in text_of(look_at(run)).split("\n"):
            assert line.isprintable() and len(line) <= 80


def test_a_long_run_is_drawn_of_bounded_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_watched(run)
    with (run / "run_0" / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps(tiny(step, 0.3 if step % 20 == 0 else None)) + "\n")
    look = look_at(run)
    history = look.history
    assert history.last is not None and history.last["step"] == 20_000
    for series in (history.loss, history.accuracy, history.samples_per_s):
        assert 400 < len(series.points) <= 1025
    assert "20,000 of 20" in text_of(look)
