"""Options that `squad train` and `squad compare` share: data, model, and a run's settings.

No torch.
"""

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args

from bert_tools.squad.settings import SCHEDULES, EngineName, SquadPrecision, SquadSettings
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import Bounds, ModelSection, check_bounds, option_name

QUICK = Path(__file__).with_name("quick")
QUICK_TRAIN, QUICK_DEV = QUICK / "train.json", QUICK / "dev.json"
VOCABULARY = "vocab.txt"
QUICK_PIECES = 1024  # of the vocabulary that is made of the questions where none is given
DEVICES = ("auto", "cpu", "cuda")

_QUICK_MODEL = {"layers": 4, "hidden": 64, "heads": 2}
_INTERMEDIATE = 4  # times the hidden size
_SETTINGS: tuple[tuple[str, type, str], ...] = (
    ("global_batch", int, "windows of an update, over all ranks"),
    ("microbatches", int, "parts that an update is cut into, the same for all engines"),
    ("learning_rate", float, "highest, after warm-up"),
    ("warmup", float, "share of the updates in which it rises"),
    ("weight_decay", float, "of AdamW"),
    ("epsilon", float, "of AdamW"),
    ("max_grad_norm", float, "gradients are clipped to this norm"),
    ("max_length", int, "tokens of a window"),
    ("stride", int, "tokens by which a window moves on"),
    ("max_question_length", int, "tokens that a question is cut to"),
    ("max_answer_length", int, "tokens of an answer"),
    ("epochs", float, "passes over the windows"),
    ("updates", int, "in the place of --epochs"),
    ("dropout", float, "default: the model's own"),
    ("noise_every", int, "updates between two measurements of the gradient's noise; 0: never"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """What is trained on, evaluated with, and begun from; `layers` .. `heads` of random weights."""

    train: Path
    dev: Path
    vocabulary: Path | None
    init_checkpoint: Path | None
    layers: Annotated[int, Bounds(1, 1000)]
    hidden: Annotated[int, Bounds(1, 2**16)]
    heads: Annotated[int, Bounds(1, 1024)]
    device: str

    def __post_init__(self) -> None:
        """Refuse sizes that are impossible."""
        check_bounds(self)
        if self.hidden % self.heads:
            problem = f"is {self.hidden}, which {self.heads} heads cannot share"
            raise ConfigError("--hidden", problem, "give a multiple of --heads")

    def as_words(self) -> list[str]:
        """The options of a rank's command line; paths whole, as the directory may be another."""
        words = ["--train", str(self.train.absolute()), "--dev", str(self.dev.absolute())]
        words += ["--device", self.device]
        if self.vocabulary is not None:
            words += ["--vocab", str(self.vocabulary.absolute())]
        if self.init_checkpoint is not None:
            return [*words, "--init-checkpoint", str(self.init_checkpoint.absolute())]
        sizes = (("--layers", self.layers), ("--hidden", self.hidden), ("--heads", self.heads))
        return words + [word for name, size in sizes for word in (name, str(size))]


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of data and model."""
    for name, default in (("train", QUICK_TRAIN), ("dev", QUICK_DEV)):
        parser.add_argument(
            f"--{name}",
            type=Path,
            default=default,
            metavar="FILE",
            help=f"SQuAD's JSON, v2.0 or v1.1 (default: ours, {default.name} of the quick set)",
        )
    parser.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="default: the checkpoint's own; without a checkpoint, made of the questions",
    )
    parser.add_argument(
        "--init-checkpoint",
        type=Path,
        metavar="DIR",
        help="weights to begin from, as `train` and `convert` write them (default: random)",
    )
    for name, size in _QUICK_MODEL.items():
        text = f"of a model with random weights (default {size})"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--device", choices=DEVICES, default="auto")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run's settings, with the defaults of SquadSettings."""
    defaults = {field.name: field.default for field in fields(SquadSettings)}
    for name, kind, text in _SETTINGS:
        default = defaults[name]
        shown = text if default is None else f"{text} (default {default:g})"
        parser.add_argument(option_name(name), type=kind, metavar="N", help=shown)
    parser.add_argument("--precision", choices=get_args(SquadPrecision), default="fp32")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="1f1b",
        help="of pipelines that name none (default 1f1b)",
    )


def data_options(args: argparse.Namespace) -> DataOptions:
    """Raises ConfigError for sizes that are impossible, or given beside a checkpoint."""
    sizes = {name: getattr(args, name) for name in _QUICK_MODEL}
    given = [name for name, size in sizes.items() if size is not None]
    if given and args.init_checkpoint is not None:
        problem = "is given, and the checkpoint has its own"
        raise ConfigError(f"--{given[0]}", problem, "leave one of them out")
    sizes = {name: _QUICK_MODEL[name] if size is None else size for name, size in sizes.items()}
    return DataOptions(
        train=args.train,
        dev=args.dev,
        vocabulary=args.vocab,
        init_checkpoint=args.init_checkpoint,
        device=args.device,
        **sizes,
    )


def settings_of(
    args: argparse.Namespace, engine: EngineName, seed: int, **changes: Any
) -> SquadSettings:
    """The settings of one run: options, and `changes` over them. Raises ConfigError."""
    given = {name: getattr(args, name) for name, _, _ in _SETTINGS}
    values = {name: value for name, value in given.items() if value is not None} | changes
    return SquadSettings(engine=engine, seed=seed, precision=args.precision, **values)


def settings_as_words(settings: SquadSettings) -> list[str]:
    """The options that give these settings to `squad train`."""
    engine = settings.engine
    name = str(engine) if engine.schedule is None else f"{engine}@{engine.schedule}"
    words = ["--engine", name, "--seed", str(settings.seed), "--precision", settings.precision]
    for name, _, _ in _SETTINGS:
        value = getattr(settings, name)
        if value is not None:
            words += [option_name(name), repr(value)]
    return words


def random_model(options: DataOptions, vocab_size: int, max_length: int) -> ModelSection:
    """The shape of a model that begins with random weights."""
    return ModelSection(
        vocab_size=vocab_size,
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.heads,
        intermediate_size=_INTERMEDIATE * options.hidden,
        max_position_embeddings=max_length,
        # arXiv 1910.05895, section 2.2: BERT's 0.02 at a width of 1,024, more for small ones.
        initializer_range=math.sqrt(2 / (5 * options.hidden)),
    )
