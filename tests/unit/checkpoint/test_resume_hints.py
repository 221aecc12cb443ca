"""A run that cannot be resumed as asked says what to type, and that works when it is typed."""

import re
import shlex
import shutil

import pytest

from mlperf_bert.__main__ import main
from resume_cases import MISSED, run_train, with_other_train
from support import contents, refusal, sets_of

HINT = re.compile(r"start a new run with (.+)$", re.MULTILINE)
KEPT = ("checkpoint.interval_steps=8", "checkpoint.keep_last=9", "eval.interval_samples=100000")


@pytest.fixture(scope="module")
def killed(tiny_config, synthetic_data, tmp_path_factory):
    """A run of 20 steps that was killed after its checkpoint of step 16."""
    directory = tmp_path_factory.mktemp("killed") / "a run"
    assert run_train(tiny_config, synthetic_data, directory, *KEPT) == MISSED
    (directory / "run_0/outcome.json").unlink()
    shutil.rmtree(directory / "run_0/checkpoints/step_00000020")
    (directory / "run_0/checkpoints/LATEST").write_text("step_00000016\n")
    return directory


@pytest.fixture
def command(killed, tiny_config, synthetic_data):
    """The words that resume the run."""
    places = ("--config", tiny_config, "--data", synthetic_data, "--run-dir", killed)
    return [*map(str, ("train", *places, "--resume", "auto")), *sets_of(*KEPT)]


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.decay_steps=30",),
        ("optim.learning_rate=1e-4",),
        ("parallel.local_batch_size=8",),
        ("data.sampler=quantile",),
        ("model.num_layers=3",),
    ],
    ids=" ".join,
)
def test_a_changed_setting_starts_a_new_run(settings, command, killed, tmp_path, capsys):
    before = contents(killed)
    words = [*command, *sets_of(*settings)]
    (typed,) = HINT.findall(refusal(capsys, *words))
    assert main([*words, *shlex.split(typed.replace("NEW", str(tmp_path / "new")))]) == MISSED
    assert (tmp_path / "new/run_0/outcome.json").exists()
    assert contents(killed) == before
    step = "resumed from step_00000016" in capsys.readouterr().out
    assert step == settings[0].startswith(("schedule", "optim"))


def test_other_data_start_a_new_run_from_the_weights(command, synthetic_data, tmp_path, capsys):
    data = with_other_train(synthetic_data, tmp_path / "data")
    words = [*command, "--data", str(data)]
    (typed,) = HINT.findall(refusal(capsys, *words))
    assert main([*words, *shlex.split(typed.replace("NEW", str(tmp_path / "new")))]) == MISSED


def test_without_a_usable_checkpoint_a_new_run_starts(command, killed, tmp_path, capsys):
    run = tmp_path / "broken"
    shutil.copytree(killed, run)
    for path in run.glob("run_0/checkpoints/step_*"):
        (path / "model.safetensors").write_bytes(b"")
    words = [*command, "--run-dir", str(run)]
    (typed,) = HINT.findall(refusal(capsys, *words))
    assert main([*words, *shlex.split(typed.replace("NEW", str(tmp_path / "new")))]) == MISSED


def test_a_setting_is_set_as_the_message_says(command, tmp_path, capsys):
    for setting, hint, right in (
        ("run.seed=12", "set it to 11", "run.seed=11"),
        ("run.max_steps=16", "use more than 16 steps", "run.max_steps=17"),
    ):
        assert hint in refusal(capsys, *command, *sets_of(setting))
        shutil.copytree(command[command.index("--run-dir") + 1], tmp_path / right)
        assert main([*command, *sets_of(right), "--run-dir", str(tmp_path / right)]) == MISSED
