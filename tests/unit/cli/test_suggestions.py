"""Mistyped names: one function suggests settings, sections, commands, options, values and files."""

from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.suggestions import did_you_mean, suggestions
from support import CONFIGS

SETTINGS = {
    "learning_rate": "optim.learning_rate",
    "schedule.learning_rate": "optim.learning_rate",
    "optim.Learning-Rate": "optim.learning_rate",
    "optim.learningrate": "optim.learning_rate",
    "optm.beta_1": "optim.beta_1",
    "optim.beta1": "optim.beta_1 or optim.beta_2",
    "parallel.batch_size": "parallel.local_batch_size",
    "model.layers": "model.num_layers",
    "data.seq_len": "data.max_seq_length",
    "run.maxsteps": "run.max_steps",
    "train.warmup": "schedule.warmup_steps or run.warm_up_steps",
}
CONFIG_SHOW = ("config", "show", "cpu_tiny", "--set")
MISTAKES = {
    "trian --config cpu_tiny": "unknown command 'trian'; did you mean train or pretrain?",
    "own-txt": "unknown command 'own-txt'; use train, pretrain, ",
    "config shw cpu_tiny": "config: unknown command 'shw'; did you mean show?",
    "bench optimiser": "bench: unknown command 'optimiser'; did you mean optimizer?",
    "train --config cpu_tiny --data d --resum d": "train: unknown option '--resum'; did ",
    "verify a b": "verify: unexpected argument 'b'; see `mlperf_bert verify --help`",
    "evaluate --checkpoint c --data d --device gpu": "evaluate: --device must be 'auto', 'cpu' or "
    "'cuda', not 'gpu'; did you mean cuda?",
    "bench train --steps many": "bench train: --steps must be an integer, not 'many'; see ",
    "train --data d": "train: missing --config; see `mlperf_bert train --help`",
    "config show cpu_tinny": "cpu_tinny: no such file or shipped config; did you mean cpu_tiny, ",
    "config show cpu_tinny.toml": "cpu_tinny.toml: No such file or directory; did you mean cpu_t",
    "config show my_confg.toml": "my_confg.toml: No such file or directory; did you mean my_co",
    "config show my_config.toml": "my_config.toml: unknown setting 'eval.target'; did you mean "
    "eval.target_accuracy?",
    "config show outside.toml": "outside.toml: unknown setting 'learning_rate'; did you mean opt",
    "config show table.toml": "table.toml: unknown section [optimizer]; did you mean optim?",
    "config show missing.toml": "missing.toml: parallel.local_batch_size is missing; add it below ",
    "config get cpu_tiny parallel.batch_size": "config: unknown setting 'parallel.batch_size'; di",
}
FILES = {
    "my_config.toml": "[optim]\nname = 'lamb'\n[eval]\ntarget = 0.5\n",  # other keys are missing
    "outside.toml": "learning_rate = 1.0\n",
    "table.toml": "[optimizer]\nname = 'lamb'\n",
    "missing.toml": "[optim]\nname = 'lamb'\n",
}
VALUES = {
    "parallel.nodes=1.5": "--set: parallel.nodes must be an integer, not 1.5",
    "parallel.nodes=0": "--set: parallel.nodes must be from 1 to 65,536, not 0",
    "optim.epsilon=0.0": "--set: optim.epsilon must be above 0, not 0.0",
    "optim.learning_rate=-1": "--set: optim.learning_rate must be at least 0, not -1.0",
    "optim.name=adam": "--set: optim.name must be 'adamw', 'lamb' or 'muon', not 'adam';"
    " did you mean adamw?",
    "run.device=gpu": "--set: run.device must be 'auto', 'cpu' or 'cuda', not 'gpu'; did you mean "
    "cuda?",
    "run.seed=always": "--set: run.seed must be an integer or 'random', not 'always'",
    "mlperf.enforce_rules=1": "--set: mlperf.enforce_rules must be true or false, not 1",
    "optim.nesterov=true": "--set: unknown setting 'optim.nesterov'; see `mlperf_bert config list "
    "optim`",
}


def refusal(capsys, words):
    capsys.readouterr()
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1, error
    return error.removeprefix("mlperf_bert: error: ")


@pytest.mark.parametrize("typed", SETTINGS)
def test_settings(typed, capsys):
    error = refusal(capsys, [*CONFIG_SHOW, f"{typed}=1"])
    assert error == f"--set: unknown setting '{typed}'; did you mean {SETTINGS[typed]}?\n"


@pytest.mark.parametrize("typed", VALUES)
def test_values(typed, capsys):
    assert refusal(capsys, [*CONFIG_SHOW, typed]) == VALUES[typed] + "\n"


@pytest.mark.parametrize("line", MISTAKES)
def test_commands_options_and_files(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert refusal(capsys, line.split()).startswith(MISTAKES[line])


def test_nothing_similar_suggests_nothing():
    assert suggestions("zzz", [path.stem for path in CONFIGS.glob("*.toml")]) == []
    assert did_you_mean("zzz", ["train"], "see the list") == "see the list"
