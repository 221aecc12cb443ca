"""Bad input of every kind: one clear line, status 2, and the disk as it was."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from support import run_cli

Tree = dict[str, bytes]


def tree(folder: Path) -> Tree:
    """Every directory (as empty bytes) and file below `folder`."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def world(tmp_path: Path, synthetic_data: Path, tiny_config: Path) -> Path:
    """A directory of the test's own with good data, a good config, a text and a vocabulary."""
    shutil.copytree(synthetic_data, tmp_path / "data")
    shutil.copy(tiny_config, tmp_path / "tiny.toml")
    shutil.copy(synthetic_data / "words.txt", tmp_path / "vocab.txt")
    shutil.copy(synthetic_data / "train.txt", tmp_path / "text.txt")
    return tmp_path


def refused(world: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that must be refused and leave everything as it is."""
    before = tree(world)
    capsys.readouterr()
    assert main([str(word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlperf_bert: error: ") and error.count("\n") == 1, error
    assert tree(world) == before
    return error


def train(world: Path, *settings: str) -> list[object]:
    places = ["--config", world / "tiny.toml", "--data", world / "data", "--run-dir", world / "run"]
    return ["train", *places, *(word for setting in settings for word in ("--set", setting))]


def prepare(world: Path) -> list[object]:
    places = ["--vocab", world / "vocab.txt", "--out", world / "set"]
    return ["prepare", "--text", world / "text.txt", *places, "--max-seq-length", "32"]


# What is done to the world -> what the line must name. The problem first, then the way out.
def no_data(world: Path) -> None:
    shutil.rmtree(world / "data")


def no_eval(world: Path) -> None:
    shutil.rmtree(world / "data" / "eval")


def truncated_shard(world: Path) -> None:
    shard = world / "data" / "train" / "shards" / "train.hdf5"
    shard.write_bytes(shard.read_bytes()[:-100])


def truncated_index(world: Path) -> None:
    lengths = world / "data" / "eval" / "index" / "lengths.u16"
    lengths.write_bytes(lengths.read_bytes()[:-2])


def broken_sidecar(world: Path) -> None:
    sidecar = world / "data" / "train" / "shards" / "train.hdf5.json"
    sidecar.write_bytes(sidecar.read_bytes().replace(b'"num_samples": ', b'"num_samples": -'))


def foreign_shard(world: Path) -> None:
    sidecar = world / "data" / "train" / "shards" / "train.hdf5.json"
    values = json.loads(sidecar.read_text())
    values["settings"]["vocabulary_sha256"] = "0" * 64
    sidecar.write_text(json.dumps(values))


def two_vocabularies(world: Path) -> None:
    words = (world / "vocab.txt").read_text().replace("w1\nw2\n", "w2\nw1\n")
    (world / "swapped.txt").write_text(words)
    shutil.rmtree(world / "data" / "eval")
    places = ["--vocab", world / "swapped.txt", "--out", world / "data" / "eval"]
    sizes = ["--max-seq-length", "32", "--max-predictions", "5"]
    command = ["prepare", "--text", world / "text.txt", *places, *sizes]
    assert main([str(word) for word in command]) == 0


def run_exists(world: Path) -> None:
    (world / "run" / "run_0").mkdir(parents=True)
    (world / "run" / "run_0" / "metrics.jsonl").write_text("precious\n")


def log_exists(world: Path) -> None:
    (world / "run").mkdir()
    (world / "run" / "result_0.txt").write_text("precious\n")


def run_dir_is_a_file(world: Path) -> None:
    (world / "run").write_text("precious\n")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (no_data, ["data/train", "mlperf_bert prepare"]),
        (no_eval, ["data/eval", "mlperf_bert prepare"]),
        (truncated_shard, ["train.hdf5", "bytes", "prepare"]),
        (truncated_index, ["lengths.u16", "prepare"]),
        (broken_sidecar, ["train.hdf5.json", "num_samples", "prepare"]),
        (foreign_shard, ["train.hdf5.json", "vocabulary_sha256", "prepare"]),
        (two_vocabularies, ["--data", "different vocabularies"]),
        (run_exists, ["--run-dir", "run 0 already", "new directory"]),
        (log_exists, ["--run-dir", "run 0 already", "new directory"]),
        (run_dir_is_a_file, ["--run-dir", "write to"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_training_refuses(
    world: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], words: list[str]
) -> None:
    harm(world)
    error = refused(world, capsys, *train(world))
    assert all(word in error for word in words), error


def test_a_place_that_takes_no_directories_is_refused(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train(world)
    command[-1] = Path("/proc/nothing/run")
    error = refused(world, capsys, *command)
    assert "--run-dir" in error and "/proc/nothing/run" in error and "write to" in error


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optim.momentum=0.9", ["optim.momentum", "no such setting", "beta_1"]),
        ("optimizer.name=lamb", ["[optimizer]", "no such section", "optim"]),
        ("run.max_steps=many", ["run.max_steps"]),
        ("run.max_steps=1.5", ["run.max_steps"]),
        ("optim.name=sgd", ["optim.name", "adamw"]),
        ("parallel.local_batch_size=0", ["parallel.local_batch_size"]),
        ("parallel.local_batch_size=-4", ["parallel.local_batch_size"]),
        (
            "parallel.local_batch_size=1000000",
            ["parallel.local_batch_size", "1,000,000", "samples"],
        ),
        ("parallel.grad_accum_steps=0", ["parallel.grad_accum_steps"]),
        ("parallel.nodes=2", ["parallel.ranks_per_node", "2 x 1 ranks"]),
        ("eval.target_accuracy=1.2", ["eval.target_accuracy", "1e-06 .. 0.999999"]),
        ("eval.target_accuracy=0", ["eval.target_accuracy", "1e-06 .. 0.999999"]),
        ("clip.max_norm=inf", ["clip.max_norm", "finite"]),
        ("model.num_heads=3", ["model"]),
        ("model.vocab_size=70", ["model.vocab_size"]),
        ("data.max_seq_length=16", ["data.max_seq_length"]),
    ],
)
def test_settings_are_refused(
    world: Path, capsys: pytest.CaptureFixture[str], setting: str, words: list[str]
) -> None:
    error = refused(world, capsys, *train(world, setting))
    assert all(word in error for word in words), error


def test_a_config_with_a_typing_error_names_the_line(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world / "tiny.toml"
    config.write_text(config.read_text().replace("max_steps = 20", "max_steps = = 20"))
    error = refused(world, capsys, *train(world))
    assert "tiny.toml" in error and "line 3" in error


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", ["text.txt", "empty"]),
        (b" \n\n \n", ["text.txt", "empty"]),
        (b"w1 w2\n\nw3 \xff w4\n", ["text.txt", "UTF-8", "byte 10"]),
        (b"w1 w2\nw2 w3\n", ["text.txt", "documents", "empty line"]),
    ],
)
def test_preparation_refuses_texts(
    world: Path, capsys: pytest.CaptureFixture[str], contents: bytes, words: list[str]
) -> None:
    assert main([str(word) for word in prepare(world)]) == 0  # the good text
    shutil.rmtree(world / "set")
    (world / "text.txt").write_bytes(contents)
    error = refused_set(world, capsys)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"[MASK]\n", b"", ["vocab.txt", "[MASK]"]),
        (b"w1\n", b"w2\n", ["vocab.txt", "w2"]),
        (b"w1\n", b"\xff\n", ["vocab.txt", "UTF-8"]),
    ],
)
def test_preparation_refuses_vocabularies(
    world: Path, capsys: pytest.CaptureFixture[str], old: bytes, new: bytes, words: list[str]
) -> None:
    vocabulary = world / "vocab.txt"
    vocabulary.write_bytes(vocabulary.read_bytes().replace(old, new, 1))
    error = refused_set(world, capsys)
    assert all(word in error for word in words), error


def refused_set(world: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """As `refused`; but directories may stay, because a restart of `prepare` goes on in them."""
    before = tree(world)
    capsys.readouterr()
    assert main([str(word) for word in prepare(world)]) == 2
    error = capsys.readouterr().err
    assert error.count("mlperf_bert: error: ") == 1 and "Traceback" not in error
    after = {name: contents for name, contents in tree(world).items() if (world / name).is_file()}
    new = after.keys() - before.keys()
    assert new <= {"set/vocab.txt"}
    assert before.items() >= {name: after[name] for name in after.keys() - new}.items()
    return error


def test_preparing_over_another_vocabulary_loses_nothing(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(word) for word in prepare(world)]) == 0
    with (world / "vocab.txt").open("a") as file:
        file.write("another\n")
    error = refused(world, capsys, *prepare(world))
    assert "vocab.txt" in error and "new directory" in error


def test_a_checkpoint_of_another_model_leaves_no_run(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(word) for word in train(world, "run.max_steps=1")]) == 3
    (world / "run").rename(world / "first")
    command = train(world, "model.hidden_size=16", "model.intermediate_size=32")
    checkpoints = world / "first" / "run_0" / "checkpoints"
    error = refused(world, capsys, *command, "--init-checkpoint", checkpoints)
    assert "checkpoints/step_00000001" in error and "config it was made with" in error


@pytest.mark.parametrize(
    "command",
    ["train", "evaluate", "convert", "export", "prepare", "verify", "config", "bench"],
)
def test_debug_shows_the_traceback_too(
    world: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    missing = str(world / "none")
    arguments = {
        "train": ["--config", missing, "--data", missing],
        "evaluate": ["--checkpoint", missing, "--data", missing],
        "convert": ["--from", "huggingface", missing, "--out", missing],
        "export": [missing, "--to", "huggingface", missing],
        "prepare": ["--text", missing, "--vocab", missing, "--out", missing],
        "verify": [missing],
        "config": [missing],
        "bench": ["against", "--set", "model.hidden_size=200"],
    }[command]
    error = refused(world, capsys, command, *arguments)
    assert main([command, *arguments, "--debug"]) == 2
    with_traceback = capsys.readouterr().err
    assert with_traceback.startswith("Traceback") and with_traceback.endswith(error)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_in_processes_of_their_own_say_it_too(world: Path, ranks: int) -> None:
    truncated_shard(world)
    before = tree(world)
    sizes = (f"parallel.ranks_per_node={ranks}", f"parallel.local_batch_size={16 // ranks}")
    done = run_cli(*train(world, *sizes))
    assert done.returncode == 2
    # What a rank says that the launcher ended before it came to the shard itself.
    ended = "mlperf_bert: SIGTERM before the first step: nothing to save"
    (line,) = set(done.stderr.splitlines()) - {ended}
    assert "train.hdf5" in line
    assert tree(world) == before
