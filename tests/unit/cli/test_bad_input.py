"""Bad input of every kind: one clear line, status 2, and the disk as it was."""

import re
import shutil

import pytest

from mlperf_bert.__main__ import main
from support import contents, refusal, snapshot


@pytest.fixture
def world(tmp_path, synthetic_data, tiny_config):
    """A directory of the test's own with good data, a good config, a text and a vocabulary."""
    shutil.copytree(synthetic_data, tmp_path / "data")
    shutil.copy(tiny_config, tmp_path / "tiny.toml")
    shutil.copy(synthetic_data / "words.txt", tmp_path / "vocab.txt")
    shutil.copy(synthetic_data / "train.txt", tmp_path / "text.txt")
    return tmp_path


def refused(world, capsys, *arguments):
    """The one line of a command that must be refused and leave everything as it is."""
    before = snapshot(world)
    error = refusal(capsys, *arguments)
    assert snapshot(world) == before
    return error


def train(world, *settings):
    places = ["--config", world / "tiny.toml", "--data", world / "data", "--run-dir", world / "run"]
    return ["train", *places, *(word for setting in settings for word in ("--set", setting))]


def prepare(world, vocabulary="vocab.txt", out="set"):
    places = ["--vocab", str(world / vocabulary), "--out", str(world / out)]
    sizes = ["--max-seq-length", "32", "--max-predictions", "5"]
    return ["prepare", "--text", str(world / "text.txt"), *places, *sizes]


def cut(contents):
    return contents[:-2]


def precious(_):
    return b"precious\n"


def foreign(sidecar):
    return re.sub(rb'("vocabulary_sha256": )"\w+"', rb'\1"%s"' % (b"0" * 64), sidecar)


def mistyped(config):
    return config.replace(b"max_steps = 20", b"max_steps = = 20")


def change(path, how):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(how(path.read_bytes() if path.exists() else b""))


@pytest.mark.parametrize(
    ("changed", "how", "words"),
    [
        ("data/train", None, ["data/train", "mlperf_bert prepare"]),
        ("data/eval", None, ["data/eval", "mlperf_bert prepare"]),
        ("data/train/shards/train.hdf5", cut, ["train.hdf5", "bytes", "prepare"]),
        ("data/eval/index/lengths.u16", cut, ["lengths.u16", "prepare"]),
        ("data/train/shards/train.hdf5.json", foreign, ["vocabulary_sha256", "prepare"]),
        ("run/run_0/metrics.jsonl", precious, ["--run-dir", "already has run 0", "new directory"]),
        ("run/result_0.txt", precious, ["--run-dir", "already has run 0", "new directory"]),
        ("run", precious, ["--run-dir", "write to"]),
        ("tiny.toml", mistyped, ["tiny.toml", "line 3"]),
        ("optim.nesterov=true", None, ["unknown setting 'optim.nesterov'", "config list optim"]),
        ("parallel.local_batch_size=1000000", None, ["training examples", "batch needs 1,000,000"]),
        ("parallel.nodes=2", None, ["parallel.ranks_per_node", "2 x 1 ranks"]),
        ("model.vocab_size=70", None, ["model.vocab_size"]),
        ("data.max_seq_length=16", None, ["data.max_seq_length"]),
    ],
)
def test_training_refuses(world, capsys, changed, how, words):
    """A file that is changed by `how` or is not there, or a setting."""
    settings = [changed] if "=" in changed else []
    if how is not None:
        change(world / changed, how)
    elif not settings:
        shutil.rmtree(world / changed)
    command = train(world, *settings)
    error = refused(world, capsys, *command)
    assert all(word in error for word in words), error
    if not changed.startswith(("run", "parallel.nodes")):
        validate = ("config", "validate", world / "tiny.toml", *command[3:5], *command[7:])
        assert refused(world, capsys, *validate) == error


def test_two_vocabularies_are_refused(world, capsys):
    shutil.copy(world / "vocab.txt", world / "swapped.txt")
    change(world / "swapped.txt", lambda words: words.replace(b"w1\nw2\n", b"w2\nw1\n"))
    shutil.rmtree(world / "data/eval")
    assert main(prepare(world, "swapped.txt", "data/eval")) == 0
    error = refused(world, capsys, *train(world))
    assert "--data" in error and "different vocabularies" in error


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("text.txt", lambda _: b"w1 w2\n\nw3 \xff w4\n", ["UTF-8", "byte 10"]),
        ("text.txt", lambda _: b"w1 w2\nw2 w3\n", ["documents", "empty line"]),
        ("vocab.txt", lambda words: words.replace(b"[MASK]\n", b"", 1), ["[MASK]"]),
    ],
)
def test_preparation_refuses(world, capsys, name, how, words):
    change(world / name, how)
    before = contents(world)
    capsys.readouterr()
    assert main(prepare(world)) == 2
    error = capsys.readouterr().err
    assert error.count("mlperf_bert: error: ") == 1 and "Traceback" not in error
    assert all(word in error for word in (name, *words)), error
    after = contents(world)  # directories may stay, because a restart goes on in them
    assert after.keys() - before.keys() <= {"set/vocab.txt"}
    assert after.items() >= before.items()


def test_preparing_over_another_vocabulary_loses_nothing(world, capsys):
    assert main(prepare(world)) == 0
    with (world / "vocab.txt").open("a") as file:
        file.write("another\n")
    error = refused(world, capsys, *prepare(world))
    assert "vocab.txt" in error and "new directory" in error


def test_a_checkpoint_of_another_model_leaves_no_run(world, capsys):
    assert main([str(word) for word in train(world, "run.max_steps=1")]) == 3
    (world / "run").rename(world / "first")
    command = train(world, "model.hidden_size=16", "model.intermediate_size=32")
    checkpoints = world / "first" / "run_0" / "checkpoints"
    error = refused(world, capsys, *command, "--init-checkpoint", checkpoints)
    assert "first/run_0/checkpoints/step_00000001 have 32; set it to 32" in error


@pytest.mark.parametrize(
    "line",
    [
        "train --config {0} --data {0}",
        "convert --from huggingface {0} --out {0}",
        "prepare --text {0} --vocab {0} --out {0}",
        "verify {0}",
        "config show {0}",
        "bench transformers --config {0}",
    ],
)
def test_debug_shows_the_traceback_too(world, capsys, line):
    command = line.format(world / "none").split()
    error = refused(world, capsys, *command)
    assert main([*command, "--debug"]) == 2
    with_traceback = capsys.readouterr().err
    assert with_traceback.startswith("Traceback") and with_traceback.endswith(error)
