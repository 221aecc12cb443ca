"""What a run prints is for people: no tool reads it, so that its sentences can be improved."""

import os

from run_cases import log_line, record, write_environment, write_run

from report_pages import page_of
from support import REPOSITORY

SENTENCES = (
    "step 5 of 20: loss 1.0000, accuracy 0.9999, 1 samples/s",
    "evaluation at 320 samples: accuracy 0.9999 (0.5 s)",
    "checkpoint step_00000010: 0.3 MB in 0.1 s",
    "reached 0.9999 after 5 steps, 80 samples, 1.0 s of training",
)
# Only the time at which it was last written counts.
MAY_NAME_IT = {"tools/bert_tools/report/watch.py"}


def test_other_words_of_the_console_give_the_same_page_and_screen(tmp_path, told, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [record(10, 0.5), record(20, 0.99)], said=SENTENCES)
    write_environment(run / "run_0")
    clock = {"init_start": 1, "init_stop": 2, "run_start": 2, "run_stop": 90}
    log = "".join(log_line(key, None, at) for key, at in clock.items())
    (run / "result_0.txt").write_text(log, encoding="ascii")
    console = run / "run_0" / "stdout.log"
    written = console.stat()
    page, screen = page_of(run), told("watch", run, "--once")
    assert "0.9900" in page and "0.9900" in screen
    for words in (b"", b"Quite other words: 0.1234.\n", b"\xff\xfe\x00" * 1000):
        console.write_bytes(words)
        os.utime(console, ns=(written.st_atime_ns, written.st_mtime_ns))
        assert page_of(run) == page
        assert told("watch", run, "--once") == screen


def test_no_tool_opens_what_a_run_has_printed():
    """Whoever wants a figure of a run takes it from its metrics, its MLPerf log or its outcome."""
    tools = REPOSITORY / "tools"
    found = {
        str(path.relative_to(REPOSITORY))
        for path in tools.rglob("*.py")
        if "stdout.log" in path.read_text(encoding="utf-8")
    }
    assert found == MAY_NAME_IT
