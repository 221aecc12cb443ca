"""The files of a fine-tuning run, read and checked: questions, vocabulary, weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from bert_tools.squad.questions import Questions, read_questions
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.weights import Start, check_fits, random_start, start_from
from bert_tools.squad.windows import Windows, make_windows
from mlperf_bert.checkpoint.manifest import read_manifest, resolve
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, load_any_vocabulary, vocabulary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadInputs:
    """The files of a run. Without a checkpoint, `model` with random weights and a vocabulary.

    `vocabulary` None: the one beside the checkpoint.
    """

    train: Path
    dev: Path
    vocabulary: Path | None = None
    init_checkpoint: Path | None = None
    model: ModelSection | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was read of them."""

    train: Questions
    dev: Questions
    train_windows: Windows
    dev_windows: Windows
    vocabulary: AnyVocabulary
    start: Start


def prepare(settings: SquadSettings, inputs: SquadInputs) -> Prepared:
    """Read questions, vocabulary and weights. Raises ConfigError, DataError, CheckpointError."""
    vocabulary, start = _read_start(settings, inputs)
    if settings.dropout is not None:
        model = replace(
            start.model, hidden_dropout=settings.dropout, attention_dropout=settings.dropout
        )
        start = replace(start, model=model)
    check_fits(start.model, len(vocabulary), settings.max_length)
    train, dev = read_questions(inputs.train), read_questions(inputs.dev)
    found = []
    for questions, path in ((train, inputs.train), (dev, inputs.dev)):
        windows = make_windows(
            questions,
            vocabulary,
            max_length=settings.max_length,
            stride=settings.stride,
            max_question_length=settings.max_question_length,
        )
        if not len(windows):
            raise DataError(str(path), "has no questions", "give a set with some")
        found.append(windows)
    return Prepared(train, dev, found[0], found[1], vocabulary, start)


def _read_start(settings: SquadSettings, inputs: SquadInputs) -> tuple[AnyVocabulary, Start]:
    seed = derive_seed(settings.seed, "squad weights")
    if inputs.init_checkpoint is None:
        if inputs.vocabulary is None or inputs.model is None:
            problem = "is not given, nor are a vocabulary and a model's shape"
            raise ConfigError("--init-checkpoint", problem, "give it")
        vocabulary = load_any_vocabulary(inputs.vocabulary)
        return vocabulary, random_start(inputs.model, seed)
    checkpoint = resolve(inputs.init_checkpoint)
    digest = read_manifest(checkpoint).vocabulary_sha256
    vocabulary = vocabulary_of(checkpoint, digest, inputs.vocabulary, None)
    return vocabulary, start_from(checkpoint, vocabulary.sha256, seed)
