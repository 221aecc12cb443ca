"""Every command that writes, in words, and what it reads: for the sweep over full disks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from import_cases import SMALL, VOCAB, make_foreign, make_from_text
from own_texts import made_up_texts
from submissions import OPEN, write_repository
from support import CONFIGS, make_tiny_inputs, run_cli

MISSED = 3  # exit status


@dataclass(frozen=True)
class Inputs:
    """What the commands read, on another disk."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        return self.root / name

    @property
    def run(self) -> Path:
        """A run that has ended, with a checkpoint."""
        return self.root / "run" / "run_0"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step_00000020"


def make_inputs(root: Path) -> Inputs:
    """Data, a config, a run, its weights as another program's, a submission, texts."""
    inputs = Inputs(root)
    make_tiny_inputs(root)
    (root / "own").mkdir()
    (root / "own" / "text.txt").write_text("\n\n".join(made_up_texts()) + "\n")
    (root / "foreign").mkdir()
    make_foreign(make_from_text(root / "foreign"), root / "foreign")
    write_repository(root / "submission", {OPEN: "open"})
    (root / "space.toml").write_text(SPACE)
    done(*train(inputs, root / "run"), expected=MISSED)
    done("export", "--to", "huggingface", inputs.checkpoint, root / "huggingface")
    done(*squad("train", root / "squad"))
    return inputs


def done(*words: object, expected: int = 0) -> None:
    ended = run_cli(*words)
    assert ended.returncode == expected, ended.stderr


SMALL_MODEL = (
    *("--set", "model.num_layers=1", "--set", "model.hidden_size=16", "--set", "model.num_heads=2"),
    *("--set", "model.vocab_size=100", "--set", "data.max_seq_length=32"),
    *("--set", "parallel.local_batch_size=2"),
)
SPACE = '[[parameter]]\nkey = "optim.learning_rate"\nlow = 1e-4\nhigh = 1e-1\nscale = "log"\n'


def train(inputs: Inputs, out: Path) -> tuple[object, ...]:
    paths = ("--config", inputs.root / "tiny.toml", "--data", inputs.root, "--run-dir", out)
    checkpoints = ("--set", "checkpoint.interval_steps=5", "--set", "checkpoint.keep_last=9")
    return ("train", *paths, *checkpoints)


def squad(what: str, out: Path, *words: object) -> tuple[object, ...]:
    tiny = ("--layers", 1, "--hidden", 16, "--max-length", 64, "--stride", 24, "--device", "cpu")
    where = "--out" if what == "compare" else "--run-dir"
    return ("squad", what, *tiny, "--updates", 2, "--microbatches", 4, where, out, *words)


def prepare(*words: object) -> tuple[object, ...]:
    lengths = ("--max-seq-length", 32, "--max-predictions", 5)
    return ("prepare", *words, *lengths)


# Name -> the command's words, of what it reads and the disk to write to.
Words = Callable[[Inputs, Path], tuple[object, ...]]
COMMANDS: dict[str, Words] = {
    "prepare --text": lambda i, d: prepare(
        *("--text", i.root / "train.txt", i.root / "eval.txt", "--vocab", i.root / "words.txt"),
        *("--out", d / "set", "--workers", 1),
    ),
    "prepare --text, 2 workers": lambda i, d: prepare(
        *("--text", i.root / "train.txt", i.root / "eval.txt", "--vocab", i.root / "words.txt"),
        *("--out", d / "set", "--workers", 2),
    ),
    "prepare --corpus": lambda i, d: prepare(
        *("--corpus", i.root / "own" / "text.txt", "--out", d / "set", "--workers", 1),
        *("--documents", "empty-line", "--held-out", 0.2, "--vocab-size", 300),
    ),
    "prepare --embedded": lambda i, d: (
        *("prepare", "--embedded", "--config", CONFIGS / "cpu_tiny.toml", "--out", d / "set"),
    ),
    "prepare --tfrecord": lambda i, d: (
        *("prepare", "--tfrecord", *sorted((i.root / "foreign").glob("*.tfrecord"))),
        *("--vocab", VOCAB, "--out", d / "set", "--workers", 1, *limits()),
    ),
    "prepare --hdf5": lambda i, d: (
        *("prepare", "--hdf5", *sorted((i.root / "foreign").glob("*.fixed.hdf5"))),
        *("--vocab", VOCAB, "--out", d / "set", "--workers", 2, *limits()),
    ),
    "stage-data": lambda i, d: (
        *("stage-data", "--config", i.root / "tiny.toml", "--data", i.root, "--out", d / "set"),
        "--whole",
    ),
    "convert": lambda i, d: (
        *("convert", "--from", "huggingface", i.root / "huggingface", "--out", d / "checkpoint"),
    ),
    "export": lambda i, d: ("export", "--to", "huggingface", i.checkpoint, d / "exported"),
    "train": lambda i, d: train(i, d / "run"),
    "train, 2 ranks": lambda i, d: (
        *train(i, d / "run"),
        *("--set", "parallel.ranks_per_node=2", "--set", "parallel.local_batch_size=8"),
    ),
    "report": lambda i, d: (
        *("report", i.run, "--out", d / "page.html", "--png", d / "png"),
        *("--tensorboard", d / "scalars"),
    ),
    "package": lambda i, d: (
        *("package", "--root", i.root / "submission", "--out", d / "package"),
        *("--ruleset", "5.0.0"),
    ),
    "tune": lambda i, d: (
        *("tune", "--config", i.root / "tiny.toml", "--space", i.root / "space.toml"),
        *("--data", i.root, "--study", d / "study", "--trials", 1, "--repeats", 0),
        *("--set", "eval.target_accuracy=0.01"),
    ),
    "tune --workers 2": lambda i, d: (
        *COMMANDS["tune"](i, d),
        *("--workers", 2, "--trials", 2),
    ),
    "squad train": lambda i, d: squad("train", d / "run"),
    "squad evaluate": lambda i, d: (
        *("squad", "evaluate", "--model", i.root / "squad" / "model", "--max-length", 64),
        *("--stride", 24, "--device", "cpu", "--predictions", d / "answers.json"),
    ),
    "squad compare": lambda i, d: squad("compare", d / "study", "--engines", "single,ddp:2"),
    "system": lambda i, d: ("system", "--describe", "--out", d / "system.json"),
    "plan balance": lambda i, d: (
        *("plan", "balance", "--nodes", 2, "--gpus-per-node", 2, "--local-batch-size", 4),
        *("--draws", 2, "--out", d / "balance.png"),
    ),
    "plan law": lambda i, d: ("plan", "law", "--out", d / "law.png"),
    "plan buckets": lambda i, d: (
        *("plan", "buckets", "--config", i.root / "tiny.toml", "--out", d / "buckets.png"),
    ),
    "plan suggest": lambda i, d: (
        *("plan", "suggest", "--nodes", 1, "--gpus", 8, "--out", d / "suggested_1x8x16x1.toml"),
    ),
    "plan cluster": lambda i, d: (
        *("plan", "cluster", "--nodes", 2, "--gpus-per-node", 2, "--local-batch-size", 4),
        *("--draws", 2, "--timeline", d / "timeline.png"),
    ),
    "bench profile": lambda i, d: (
        *("bench", "profile", *SMALL_MODEL, "--steps", 2, "--trace", d / "profile.json.gz"),
    ),
    "bench scale": lambda i, d: (
        *("bench", "scale", *SMALL_MODEL, "--total-seconds", 1, "--plot", d / "scale.png"),
    ),
    "bench loader": lambda i, d: (
        *("bench", "loader", "--dir", d / "set", "--megabytes", 1, "--rounds", 1),
    ),
}


def limits() -> tuple[object, ...]:
    return (
        *("--max-seq-length", SMALL["max_seq_length"]),
        *("--max-predictions", SMALL["max_predictions"]),
    )
