"""A mistyped weights directory gives one sentence in every command that reads weights."""

import pytest

from mlperf_bert.run import console
from support import refusal

WRONG, RIGHT = "bert-bsae-uncased", "bert-base-uncased"
COMMANDS = (
    "train --config {config} --data {data} --run-dir run --init-checkpoint {weights}",
    "train --config {config} --data {data} --run-dir run --resume {weights}",
    "train --config {config} --data {data} --run-dir run --set run.init_checkpoint={weights}",
    "config validate {config} --data {data} --init-checkpoint {weights}",
    "evaluate --data {data} --checkpoint {weights}",
    "fill text --checkpoint {weights}",
    "export {weights} --to huggingface --out out",
    "convert {weights} --from huggingface --out out",
    "pretrain {data}/train.txt --out out --init-checkpoint {weights}",
    "pretrain {data}/train.txt --out out --only choose --init-checkpoint {weights}",
    "squad train --engine single --updates 1 --run-dir run --init-checkpoint {weights}",
)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, tiny_config, synthetic_data):
    """The line of a command that is refused, without its program's name."""
    monkeypatch.setattr(console, "SILENCE_S", (300.0, 300.0))  # no more lines on a busy machine
    monkeypatch.chdir(tmp_path)

    def refused(line, weights):
        words = line.format(config=tiny_config, data=synthetic_data, weights=weights).split()
        return refusal(capsys, *words).removeprefix("mlperf_bert: error: ").rstrip("\n")

    return refused


@pytest.mark.parametrize("line", COMMANDS)
def test_a_mistyped_directory_is_the_same_sentence(refused, tmp_path, line):
    assert refused(line, WRONG).startswith(f"{WRONG}: no such directory; pass ")
    (tmp_path / RIGHT).mkdir()
    assert refused(line, WRONG) == f"{WRONG}: no such directory; did you mean {RIGHT}?"
    (tmp_path / "runs/first/run_0/checkpoints").mkdir(parents=True)
    wrong, right = (f"runs/{name}/run_0/checkpoints" for name in ("fisrt", "first"))
    assert refused(line, wrong) == f"{wrong}: no such directory; did you mean {right}?"
    (tmp_path / "a_file").touch()
    assert refused(line, "a_file").startswith("a_file: is not a directory; pass ")


def test_what_to_pass_is_what_the_command_accepts(refused):
    for line in COMMANDS:
        said = refused(line, WRONG).partition("; ")[2]
        assert ("save_pretrained()" in said) == (
            line.startswith(("convert", "pretrain")) and "--only" not in line
        )
        assert ("RUN_DIR/run_0/checkpoints" in said) == (not line.startswith("convert"))
