"""A text that is trained longer than before: what `pretrain` says to type works when typed."""

import re
import shlex
import shutil

import pytest

from bert_tools.pretrain import cli
from mlperf_bert.__main__ import main
from mlperf_bert.distributed import spawn
from mlperf_bert.run import console
from own_texts import write_letters
from support import refusal

SETTINGS = (
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=1"),
    *("model.vocab_size=300", "parallel.ranks_per_node=1", "mlperf.enforce_rules=false"),
    *("run.device=cpu", "run.log_interval_steps=1", "schedule.warmup_steps=0"),
    *("checkpoint.interval_steps=2", "checkpoint.keep_last=9"),
)


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "interrupted"])
def test_a_text_is_trained_longer(tmp_path, monkeypatch, capsys, is_finished):
    """In this process alone: its workers and its rank have tests of their own."""
    monkeypatch.setattr(cli, "usable_cpus", lambda: {0})
    monkeypatch.setattr(spawn, "run_on_ranks", lambda words, _ranks, **_: main(words))
    monkeypatch.setattr(console, "SILENCE_S", (300.0, 300.0))  # no more lines on a busy machine
    text, out = write_letters(tmp_path / "a text", 160), tmp_path / "an out"
    words = ["pretrain", str(text), "--out", str(out), *(f"--set={each}" for each in SETTINGS)]
    assert main([*words, "--set", "schedule.decay_steps=4"]) == 0
    if not is_finished:
        shutil.rmtree(out / "exported")
        (out / "run/run_0/outcome.json").unlink()
        shutil.rmtree(max((out / "run/run_0/checkpoints").glob("step_*")))
    capsys.readouterr()
    longer = [*words, "--set", "schedule.decay_steps=6"]
    assert main(longer) == (0 if is_finished else 2)
    printed = capsys.readouterr()
    said = printed.out if is_finished else printed.err
    (typed,) = re.findall(r"(--out NEW --data .+)$", said, re.MULTILINE)
    new = tmp_path / "new"
    assert main([*longer, *shlex.split(typed.replace("NEW", str(new)))]) == 0
    assert "already prepared with these settings" in capsys.readouterr().out
    assert "6 steps of 32 sequences" in (new / "exported/README.md").read_text()
    assert not (new / "data").exists()


def test_a_mask_in_the_text_prevents_no_export(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "usable_cpus", lambda: {0})
    monkeypatch.setattr(spawn, "run_on_ranks", lambda words, _ranks, **_: main(words))
    text, out = write_letters(tmp_path / "a text", 160), tmp_path / "an out"
    words = ["pretrain", str(text), "--out", str(out), *(f"--set={each}" for each in SETTINGS)]
    never = refusal(capsys, *words, "--set", "checkpoint.interval_steps=never")
    assert "checkpoint.interval_steps: is 'never', but the model is exported" in never
    assert main([*words, "--set", "schedule.decay_steps=2"]) == 0
    shutil.rmtree(out / "exported")
    (out / "data/text/eval.txt").write_text("a b [MASK] c d e f g h\n")
    capsys.readouterr()
    assert main([*words, "--only", "finish"]) == 0
    assert (out / "exported/README.md").exists() and "example:" not in capsys.readouterr().out
