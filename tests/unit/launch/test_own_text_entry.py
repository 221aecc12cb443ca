"""`CORPUS=PATH ./run_and_time.sh`: own text in, a trained, evaluated and exported model out."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from own_texts import write_letters
from support import REPOSITORY, run_cli, run_process

SMALL = {
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.max_position_embeddings": 48,
    "data.max_seq_length": 48,
    "data.max_predictions": 10,
    "parallel.ranks_per_node": 1,
    "schedule.warmup_steps": 2,
    "schedule.decay_steps": 12,
    "mlperf.enforce_rules": "false",
    "run.device": "cpu",
}


def call(directory: Path, *settings: str, **variables: object) -> subprocess.CompletedProcess[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    own = {"PYTHON": sys.executable, "CLEAR_CACHES": 0, "LOGDIR": directory / "run", **variables}
    environ = {name: str(value) for name, value in own.items()}
    return run_process(REPOSITORY / "run_and_time.sh", "--", *words, **environ)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"CORPUS": "/nowhere/at/all"}, "CORPUS: there is no file or directory '/nowhere/at/all'"),
        ({"CORPUS": __file__, "VOCAB": "/nowhere"}, "VOCAB: there is no file '/nowhere'"),
        ({"ARCHITECTURE": "modern"}, "ARCHITECTURE: is for CORPUS"),
    ],
)
def test_what_is_not_there_is_one_line(
    tmp_path: Path, variables: dict[str, str], problem: str
) -> None:
    done = call(tmp_path, **variables)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if problem in line]
    assert not list(tmp_path.iterdir())


def test_another_text_has_another_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of DATADIR below .cache/, which every rank's script asks for."""

    def directory(*options: str) -> str:
        (tmp_path / "text" / "b.txt").touch()  # the same text at another time
        words = ("own-text", str(tmp_path / "text"), "--only", "choose", "--out", "out", *options)
        assert main(words) == 0
        return capsys.readouterr().out.splitlines()[1]

    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "text" / name).write_text("Some text.")
    first = directory()
    assert first.startswith("own-text-")
    assert directory() == first
    assert directory("--set", "data.max_seq_length=64") != first
    (tmp_path / "text" / "a.txt").write_text("Some more text.")
    assert directory() != first


@pytest.mark.longest
@pytest.mark.parametrize("given", ["nothing", "vocabulary", "pairs"])
def test_text_in_and_model_out(tmp_path: Path, given: str) -> None:
    write_letters(tmp_path / "text")
    data = tmp_path / "data"
    settings = [f"{name}={value}" for name, value in SMALL.items()]
    variables: dict[str, object] = {"CORPUS": tmp_path / "text", "DATADIR": data, "SEED": 4}
    if given == "vocabulary":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + n) for n in range(26))]
        words += [f"##{letter}" for letter in words[5:]]
        (tmp_path / "given.txt").write_text("\n".join(words) + "\n")
        variables["VOCAB"] = tmp_path / "given.txt"
    else:
        settings.append("model.vocab_size=300")
    if given == "pairs":
        settings += ["model.objective=mlm_nsp", "data.masking=static", "data.masking_rate=0.15"]
    done = call(tmp_path, *settings, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "accepted" in done.stdout
    last = done.stdout.splitlines()[-1]
    number = r"0\.\d+"
    shown = f"own text: held-out accuracy {number}; the best guess .* {number}; the .* {number}"
    assert re.fullmatch(shown, last)
    num_tokens = 57 if given == "vocabulary" else 300
    assert len(load_vocabulary(tmp_path / "run/run_0/vocab.txt")) == num_tokens
    exported = tmp_path / "run" / "run_0" / "exported"
    assert json.loads((exported / "config.json").read_text())["vocab_size"] >= num_tokens
    assert (exported / "model.safetensors").is_file()
    assert "12 steps of 32 sequences" in (exported / "README.md").read_text()
    checkpoints = tmp_path / "run" / "run_0" / "checkpoints"
    filled = run_cli("fill", "--checkpoint", checkpoints, "--json", "wb wd [MASK] wch")
    assert filled.returncode == 0, filled.stderr
    (candidates,) = json.loads(filled.stdout)["masks"]
    assert len(candidates) == 5
    again = call(tmp_path, *settings, **variables, LOGDIR=tmp_path / "again")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "already prepared with these settings" in again.stdout
