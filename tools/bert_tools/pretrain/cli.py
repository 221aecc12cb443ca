"""Defines the sub-command `pretrain`, which trains an encoder on a corpus and exports it.

    choose a model -> prepare -> train -> measure -> export, with a model card

Initial weights in Hugging Face's format are converted once, before these steps. To resume an
interrupted command, the user repeats it. If the command had already finished, it only
reports this. On several nodes, SLURM or mpiexec starts the ranks, so the user runs the steps one at
a time (`--only`).
"""

import argparse
import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.huggingface.export import CARD
from bert_tools.pretrain.choose import RUN, Plan, as_checkpoint, choose, expected, initial_weights
from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, add_init_checkpoint, config_to_toml
from mlperf_bert.errors import (
    STOPPED,
    TARGET_MISSED,
    CheckpointError,
    ConfigError,
    DataError,
    one_line,
    say,
    typed,
)
from mlperf_bert.machine import usable_cpus
from mlperf_bert.run.console import ProgressLines

if TYPE_CHECKING:
    import torch

    from bert_tools.huggingface.export import Facts
    from bert_tools.pretrain.prepare import CorpusRequest
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.model.bert import BertForPretraining

SEED = 12_345  # seed of the examples, the same as in the reference
DATA, EXPORTED = "data", "exported"  # directories in --out
CONVERTED = "first_weights"  # directory in --out for converted initial weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pretrain` to its parser."""
    describe(
        parser,
        "Train an encoder on your own text, measure it, and export it for Hugging Face "
        "transformers. The command fits the model's size to the text and the machine, and writes "
        "the data, the run and the model to --out. Repeat an interrupted command to resume it.",
        "mlperf_bert pretrain my_text --out my_model",
    )
    text = "text file, or directory of text files, to train on"
    parser.add_argument("text", type=Path, metavar="TEXT", help=text)
    text = "directory to write the data, the run and the exported model to"
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help=text)
    model = parser.add_argument_group("the model")
    text = "TOML file or shipped config (default: pretrain_gpu for GPUs, otherwise pretrain_cpu)"
    add_config(model, text, required=False)
    text = "architecture of the encoder (default: bert)"
    model.add_argument("--architecture", choices=("bert", "modern"), help=text)
    text = "start from this checkpoint, Hugging Face directory or published model OWNER/NAME"
    add_init_checkpoint(model, text)
    add_text_options(parser)
    steps = parser.add_argument_group("one step at a time")
    text = "directory for the prepared data (default: OUT/data)"
    steps.add_argument("--data", type=Path, metavar="DIR", help=text)
    text = "run only one step: print the config, prepare the data, or finish (measure and export)"
    steps.add_argument("--only", choices=("choose", "prepare", "finish"), help=text)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the vocabulary and for how the text is read."""
    read = parser.add_argument_group("how the text is read")
    text = "vocab.txt or tokenizer.json to use (default: build a vocabulary from the text)"
    read.add_argument("--vocab", type=Path, metavar="FILE", help=text)
    read.add_argument(
        "--documents",
        choices=("file", "empty-line"),
        help="what ends a document of plain text: the end of the file, or an empty line (default: "
        "file for 32 files or more, otherwise empty-line)",
    )
    text = "also read files with this ending as plain text (.py, or . for none). Can be repeated"
    read.add_argument(
        "--also", action="append", default=[], type=ending, metavar=".ENDING", help=text
    )
    text = "field of JSON lines or column of Parquet that contains the text (default: text)"
    read.add_argument("--text-field", metavar="NAME", help=text)


def ending(text: str) -> str:
    """Convert an option's file name ending to lower case ("." means no ending).

    Raises ArgumentTypeError, which argparse prints in one line.
    """
    if not text.startswith(".") or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not an ending of file names, such as .py")
    return text.lower()


def run(args: argparse.Namespace) -> int:
    """Run the remaining steps. Return 0, or the exit status of a training without a model."""
    if not args.text.exists():
        problem = f"there is no file or directory '{args.text}'"
        raise ConfigError("TEXT", problem, "pass a text file, or a directory of text files")
    args.data = args.data or args.out / DATA
    args.init_checkpoint = initial_weights(args)
    if args.only:
        return _only(args)
    card = args.out / EXPORTED / CARD
    if card.exists():
        again = shlex.join(["--out", "NEW", "--data", str(args.data)])
        print(f"already finished: see {card}. To train another model, use {again}")
        return 0
    try:
        return _text_to_model(args)
    except KeyboardInterrupt:
        say(f"to go on: {typed(*args.command_line)}")
        raise


def _text_to_model(args: argparse.Namespace) -> int:
    """Choose a model, prepare the text, train, measure and export the model. Return the status."""
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.run.lock import RunLock

    if read_rank_info().world_size > 1:
        remedy = "start the command once, because it starts its own ranks"
        raise ConfigError("pretrain", "was started once per rank", remedy)
    print(f"pretrain: reading {args.text}", flush=True)
    from bert_tools.pretrain.prepare import check_out_dir  # this import takes a while

    for directory in (args.out, args.data):
        check_out_dir(args.text, directory)
    run_dir = args.out / RUN
    if args.init_checkpoint is not None:
        converted = args.out.absolute() / CONVERTED  # `--only finish` may run in another directory
        args.init_checkpoint = as_checkpoint(args.init_checkpoint, converted, args.vocab)
    with ProgressLines().never_silent(lambda: "choosing the model"):
        plan = choose(args)
        if plan.config.checkpoint.interval_steps == "never":
            problem = "is 'never', but the model is exported from the last checkpoint"
            raise ConfigError("checkpoint.interval_steps", problem, "use 'auto' or a number")
        is_over = (run_dir / "run_0" / "outcome.json").exists()
        lines = [plan.in_words(), *([] if is_over else [expected(plan)])]
    print(*lines, sep="\n", flush=True)
    with RunLock(run_dir, "run_0") as lock:
        lock.check()
        _prepare(args, plan)
        words = ["train", "--config", plan.config_path, "--data", args.data, "--run-dir", run_dir]
        resume = "auto" if (run_dir / "run_0").exists() else "none"
        words += ["--resume", resume, "--go-on-by", typed(*args.command_line)]
        words += ["--new-run-by", shlex.join(["--out", "NEW", "--data", str(args.data)])]
        if args.init_checkpoint is not None:
            words += ["--init-checkpoint", args.init_checkpoint]
        words += [f"--set={each}" for each in (*plan.settings, *args.set)]
        ranks, agreed = plan.config.parallel.ranks_per_node, (STOPPED, TARGET_MISSED)
        status = run_on_ranks([*map(str, words)], ranks, agreed_statuses=agreed)
        if status not in (0, TARGET_MISSED):
            return status
        return _finish(run_dir / "run_0", args.data, args.out / EXPORTED)


def _only(args: argparse.Namespace) -> int:
    """Run only the step in `--only`, which is never the training, and return the exit status."""
    if args.only == "finish":
        is_run = (args.out / "checkpoints").exists()  # --out may be the folder of a run itself
        run_dir = args.out if is_run else args.out / RUN / "run_0"
        return _finish(run_dir, args.data, args.out / EXPORTED)
    plan = choose(args)
    if args.only == "choose":
        print(config_to_toml(plan.config), end="")
    else:
        print(f"{plan.in_words()}\n{expected(plan)}", flush=True)
        _prepare(args, plan)
    return 0


# Prepare ------------------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace, plan: Plan) -> None:
    """Prepare the data with the config's sizes. Raises ConfigError or DataError."""
    from bert_tools.pretrain.prepare import prepare_corpus

    if not prepare_corpus(_request(args, plan), args.data, workers=len(usable_cpus())):
        print(f"{args.data} is already prepared with these settings")


def _request(args: argparse.Namespace, plan: Plan) -> "CorpusRequest":
    from bert_tools.pretrain.prepare import CorpusRequest
    from mlperf_bert.data.index import ShardSettings

    names = ["max_seq_length", "max_predictions", "dupe_factor"]
    values: dict[str, Any] = {name: getattr(plan.config.data, name) for name in names}
    if plan.config.model.objective == "mlm":
        values["segments"] = "single"
    return CorpusRequest(
        source=args.text,
        documents=args.documents,
        text_field=args.text_field or "text",
        vocab_path=args.vocab,
        vocab_size=plan.config.model.vocab_size,
        settings=ShardSettings(seed=SEED, **values),
        also=tuple(args.also),
    )


# Finish -------------------------------------------------------------------------------------------


def _finish(run_dir: Path, data: Path, exported: Path) -> int:
    """Measure the model of a run and export it with a model card.

    Returns 0, or TARGET_MISSED if training diverged. Raises DataError if the run has not ended.
    """
    from bert_tools.huggingface.export import FACTS_VERSION, PRETRAIN_FACTS, export_huggingface
    from mlperf_bert.checkpoint.manifest import read_config
    from mlperf_bert.files import is_there, write_file, write_json
    from mlperf_bert.run.outcome import read_outcome

    if (exported / CARD).exists():
        print(f"already finished, see {exported / CARD}")
        return 0
    checkpoints = run_dir / "checkpoints"
    if not is_there(run_dir / "outcome.json"):
        remedy = "pass the --out of a training that has ended, or its folder run_<i>"
        raise DataError(str(run_dir), "contains no run that has ended", remedy)
    outcome = read_outcome(run_dir / "outcome.json")
    if outcome.stopped_by is not None:
        problem = f"was stopped by {outcome.stopped_by} after {outcome.steps:,} steps"
        remedy = "resume it first, with the command at the end of its stdout.log"
        raise DataError(str(run_dir), problem, remedy)
    if outcome.status != "success" and read_config(checkpoints).eval.target is None:
        remedy = "start again with another --out and a lower optim.learning_rate"
        say(f"training diverged, so no model is exported. To fix this, {remedy}")
        return TARGET_MISSED
    with ProgressLines().never_silent(lambda: "measuring and exporting the model") as shown:
        facts = _measure(run_dir, data, shown)
        values = {"schema_version": FACTS_VERSION, **asdict(facts)}
        write_file(run_dir / PRETRAIN_FACTS, write_json(values))
        export_huggingface(checkpoints, exported)
    if facts.example:
        print(f"example: {facts.example}")
    print(f"exported the model for transformers to {exported}. Its model card is {exported / CARD}")
    command = typed("score", exported, "--labelled", "FILE")
    print(f"to score the model on texts that you labelled, run {command}")
    print(f"pretrain: {facts.accuracy_in_words()}")
    return 0


def _measure(run_dir: Path, data: Path, shown: ProgressLines) -> "Facts":
    """Measure the held-out accuracy before and after training, and return facts for the model card.

    The facts also include an example of predicted words, and counts of the text.
    """
    from bert_tools.huggingface.export import Facts
    from mlperf_bert.checkpoint.load import load_weights
    from mlperf_bert.checkpoint.manifest import read_config, read_state, resolve
    from mlperf_bert.data.set_checks import open_index
    from mlperf_bert.data.shards import SampleReader
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.distributed.session import in_session
    from mlperf_bert.evaluation.evaluate import Evaluator
    from mlperf_bert.model.bert import make_model
    from mlperf_bert.step.eager import weights_dtype

    checkpoints = run_dir / "checkpoints"
    config = read_config(checkpoints)
    # Attention policies differ only by rounding, and the one used in training may not run here.
    config = replace(config, model=replace(config.model, attention="auto"))
    seed = read_state(resolve(checkpoints)).seed
    found: list[Facts] = []

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        index = open_index(data / "eval", config)
        evaluator = Evaluator.of_run(
            config, index, SampleReader(data / "eval", index.manifest), info, device
        )
        model = make_model(config, seed, device).to(weights_dtype(config.model.precision))
        evaluator.on_batch = partial(shown.counted, "measuring", "batches")
        untrained, digest = None, index.manifest.vocabulary_sha256
        try:
            if config.run.init_checkpoint:
                load_weights(model, Path(config.run.init_checkpoint), digest)
            untrained = evaluator(model).mlm_accuracy
        except CheckpointError as error:  # they were moved, or the path is of another directory
            say(f"{error.args[0]}: {error.args[1]}, so the accuracy before training is not known")
        state = load_weights(model, checkpoints, digest)
        baseline = index.manifest.baseline
        found.append(
            Facts(
                accuracy=evaluator(model).mlm_accuracy,
                steps=state.step,
                untrained=untrained,
                context_free_accuracy=None if baseline is None else baseline.context_free_accuracy,
                example=_example(model.eval(), checkpoints, data),
                **_text_facts(data),
            )
        )
        return 0

    single = RankInfo(0, 1, 0, 1, 0, "single")  # even if mpiexec started this process
    # Without a GPU here, a model that was trained on GPUs is measured on the CPU.
    in_session(run_rank, "cpu" if config.run.device == "cpu" else "auto", "allow", single)
    return found[0]


def _text_facts(data: Path) -> dict[str, int]:
    """Return the counts of the text from corpus.json, or no counts if the file does not exist."""
    from mlperf_bert.files import read_json, reading

    path = data / "corpus.json"
    if not path.exists():
        return {}
    values = read_json(path, missing="is missing", remedy="prepare the text again")
    with reading(path, "prepare the text again"):
        counts, characters = values["documents"], values.get("characters")
        facts = {"documents": counts["train"], "held_out_documents": counts["eval"]}
        if characters is not None:
            facts["characters"] = characters["of_the_text"]
            facts["left_out"] = characters["left_out"]
    return facts


def _example(model: "BertForPretraining", checkpoints: Path, data: Path) -> str | None:
    """Return a text with a held-out sentence, its masked word and predictions for this word."""
    from bert_tools.huggingface.fill import fill
    from bert_tools.huggingface.tokenizer import MASK, vocabulary_of
    from mlperf_bert.checkpoint.manifest import read_manifest, resolve

    path = data / "text" / "eval.txt"  # users may delete data/text
    if not path.exists():
        return None
    manifest = read_manifest(resolve(checkpoints))
    vocabulary = vocabulary_of(resolve(checkpoints), manifest.vocabulary_sha256, None)
    with path.open(encoding="utf-8") as file:
        sentences = (line.split() for line in file)
        words = next((each for each in sentences if 8 <= len(each) <= 20), None)
    if words is None:
        return None
    masked = max(range(len(words) // 2, len(words)), key=lambda number: words[number].isalpha())
    text = " ".join([*words[:masked], MASK, *words[masked + 1 :]])
    try:
        found = fill(model, vocabulary, text, 3)
    except ConfigError:  # the sentence is longer than the model's limit
        return None
    if len(found) > 1:  # the sentence itself contains a mask
        return None
    predicted = ", ".join(f"{each.token} {each.probability:.2f}" for each in found[0])
    return one_line(f"{text} ({words[masked]}): {predicted}")
