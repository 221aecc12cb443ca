"""Progress of a measurement: nothing is silent for long."""

import time

from bert_tools.bench.progress import Progress
from mlperf_bert.run import console


def test_a_silent_activity_is_repeated_with_what_is_left(monkeypatch, capsys):
    monkeypatch.setattr(console, "TICK_S", 0.01)
    monkeypatch.setattr(console, "SILENCE_S", (0.02, 0.02))
    said = ""

    def wait_for(text):
        nonlocal said
        end = time.monotonic() + 30
        while text not in said:
            assert time.monotonic() < end, said
            said += capsys.readouterr().err
            time.sleep(0.01)

    with Progress() as progress:
        progress.start("compiling a model")
        wait_for("... compiling a model (")
        progress.start("measuring", seconds=9.0, total=5)
        progress.advance()
        wait_for("... measuring, about 9 s left, 1 of 5 steps done (")
        progress.say("step 1/5")
        wait_for("\nstep 1/5\n")
    assert said.startswith("compiling a model\n")
    assert "\nmeasuring (about 9 s)\n" in said
