"""Defines the sub-command `pretrain`, which trains an encoder on a corpus and exports it.

    choose a model -> prepare -> train -> measure -> export, with a model card

Initial weights in Hugging Face's format are converted once, before these steps. To resume an
interrupted command, the user repeats it. If the command had already finished, it only
reports this. On several nodes, SLURM or mpiexec starts the ranks, so the user runs the steps one at
a time (`--only`).
"""

import argparse
import shlex
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.huggingface.export import CARD
from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, add_init_checkpoint, find_config, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import (
    STOPPED,
    TARGET_MISSED,
    ConfigError,
    one_line,
    say,
    typed,
)
from mlperf_bert.machine import usable_cpus
from mlperf_bert.run.console import ProgressLines, as_clock

if TYPE_CHECKING:
    import torch

    from bert_tools.huggingface.export import Facts
    from bert_tools.pretrain.prepare import CorpusRequest
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.model.bert import BertForPretraining

SEED = 12_345  # seed of the examples, the same as in the reference
DATA, RUN, EXPORTED = "data", "run", "exported"  # directories in --out
CONVERTED = "first_weights"  # directory in --out for converted initial weights
# Passes over the text. On a CPU, 1.5 MB take minutes on two cores. On a GPU they are BERT's own 40
# (arXiv 1810.04805, appendix A.2), but no such run was made here.
PASSES = {"pretrain_cpu": 20, "pretrain_gpu": 40}
# Settings that turn the same configs into ModernBERT's architecture (arXiv 2412.13663). On a GPU
# they are the published base size and first phase. On a CPU the gated feed-forward part is smaller,
# so that the model has as many weights as the plain one.
_AS_PUBLISHED = {
    "model.architecture": "modern",
    "model.layer_norm_epsilon": 1e-5,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.masking_rate": 0.3,
}
MODERN: dict[str, dict[str, Any]] = {
    "pretrain_cpu": {
        **_AS_PUBLISHED,
        "model.intermediate_size": 704,
        "data.max_predictions": 39,
    },
    "pretrain_gpu": {
        **_AS_PUBLISHED,
        "model.num_layers": 22,
        "model.intermediate_size": 1152,
        "model.max_position_embeddings": 1024,
        "data.max_seq_length": 1024,
        "data.max_predictions": 307,
        "parallel.local_batch_size": 16,
        "parallel.grad_accum_steps": 16,
    },
}
MIN_STEPS = 400  # minimum, so a small corpus is read more often
MAX_CPU_RANKS = 8
BYTES_PER_WORD = 300  # bytes of text per vocabulary entry, because entries must not be too rare
MIN_VOCABULARY = 512
BYTES_PER_TOKEN = 3  # per position, because English has 3.7 and sequences are 80% full
CONTINUED_SHARE = 0.25  # fraction of the passes if the weights are already trained (not tuned)
GPU_FLOPS = 1e14  # operations per second, assumed and not measured: a third of an A100's peak
MEASUREMENTS, MEASURED_S = 5, 3.0  # maximum number and seconds of measurements before training
_RANK_BATCH = {"parallel.local_batch_size", "parallel.grad_accum_steps"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The config of a training run, and the config file and chosen settings that it results from.

    The config also includes the user's own settings.
    """

    config_path: Path
    settings: tuple[str, ...]
    config: RunConfig
    num_gpus: int

    def in_words(self) -> str:
        """Return one line that describes the chosen model."""
        model, ranks = self.config.model, self.config.parallel.world_size
        where = {0: "the CPU", 1: "1 GPU"}.get(self.num_gpus, f"{self.num_gpus} GPUs")
        return (
            f"model: {self.config_path.stem} on {where}: {model.num_layers} layers of "
            f"{model.hidden_size}, {model.num_parameters / 1e6:,.1f} M weights, a vocabulary of "
            f"{model.vocab_size:,} tokens, sequences of up to {self.config.data.max_seq_length} "
            f"tokens, {ranks} {'rank' if ranks == 1 else 'ranks'}"
        )


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
    text = "TOML file or shipped config (default: pretrain_gpu, or pretrain_cpu without a GPU)"
    add_config(model, text, required=False)
    text = "architecture of the encoder (default: bert)"
    model.add_argument("--architecture", choices=("bert", "modern"), help=text)
    add_init_checkpoint(model)
    add_text_options(parser)
    steps = parser.add_argument_group("one step at a time")
    text = "directory for the prepared data (default: OUT/data)"
    steps.add_argument("--data", type=Path, metavar="DIR", help=text)
    text = "run only one step: choose the model, prepare the data, or finish (measure and export)"
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
    if args.only:
        return _only(args)
    args.data = args.data or args.out / DATA
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
    from bert_tools.pretrain.files import check_packages
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.run.lock import RunLock

    if read_rank_info().world_size > 1:
        remedy = "start the command once, because it starts its own ranks"
        raise ConfigError("pretrain", "was started once per rank", remedy)
    check_packages(args.text, args.vocab, args.also)
    print(f"pretrain: reading {args.text}", flush=True)
    from bert_tools.pretrain.prepare import check_out_dir  # this import takes a while

    for directory in (args.out, args.data):
        check_out_dir(args.text, directory)
    run_dir = args.out / RUN
    with ProgressLines().never_silent(lambda: "choosing the model"):
        if args.init_checkpoint is not None:
            args.init_checkpoint = _as_checkpoint(args.init_checkpoint, args.out / CONVERTED)
        plan = _choose(args)
        is_over = (run_dir / "run_0" / "outcome.json").exists()
        lines = [plan.in_words(), *([] if is_over else [_expected(plan)])]
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
        return _finish(args.out, args.data, args.out / EXPORTED)  # --out is the folder of a run
    plan = _choose(args)
    if args.only == "choose":
        print(plan.config_path, *plan.settings, sep="\n")
    else:
        args.data = args.data or args.out / DATA
        print(f"{plan.in_words()}\n{_expected(plan)}", flush=True)
        _prepare(args, plan)
    return 0


# Choose -------------------------------------------------------------------------------------------


def _as_checkpoint(given: Path, converted: Path) -> Path:
    """Return the initial weights as a checkpoint, converted from Hugging Face's format if needed.

    The result is `converted` if `given` is in Hugging Face's format, otherwise `given`. Weights are
    converted only once, so a resumed command reads only `converted`. If the weights have no
    masked-LM head, the head is randomly initialized. Raises CheckpointError, ConfigError or
    DataError.
    """
    from bert_tools.huggingface.conversion import (
        HEAD,
        plan_conversion,
        write_checkpoint,
    )
    from bert_tools.huggingface.reader import is_huggingface, open_huggingface
    from mlperf_bert.checkpoint.manifest import read_manifest
    from mlperf_bert.checkpoint.weights_directory import EITHER, check_directory

    if not given.exists():
        if not converted.exists():
            check_directory(given, EITHER)
        return converted
    if not is_huggingface(given):
        return given
    source = open_huggingface(given)
    origin = {"format": "huggingface", **source.origin}
    if converted.exists():
        if not origin.items() <= read_manifest(converted).origin.items():
            problem = f"was converted from weights other than {given}"
            raise ConfigError(str(converted), problem, "pass another --out")
        return converted
    plan = plan_conversion(source, None, "draw")
    write_checkpoint(plan, converted, origin)
    head = f" (it has no {HEAD}, which is initialized at random)" if plan.drawn else ""
    print(f"converted {given} ({source.form}) to {converted}{head}", flush=True)
    return converted


def _choose(args: argparse.Namespace) -> Plan:
    """Choose the config, and the settings that fit the text and the machine.

    The user's own settings take precedence. The raw size is the only property of the text that
    matters, so the scripts of all ranks make the same choice.
    """
    import torch

    from bert_tools.pretrain.files import find_files, text_bytes
    from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary

    halves = (each.partition("=") for each in args.set)
    own = {name.strip(): value.strip(" '\"") for name, _, value in halves}
    num_gpus = 0 if own.get("run.device") == "cpu" else torch.cuda.device_count()
    path = args.config or find_config(f"pretrain_{'gpu' if num_gpus else 'cpu'}")
    settings: dict[str, Any] = {}

    def chosen() -> tuple[str, ...]:
        """Return the chosen settings that the user did not set, in the format of `--set`."""
        return tuple(f"{name}={value}" for name, value in settings.items() if name not in own)

    def config_with(more: dict[str, Any]) -> RunConfig:
        """Add `more` to the chosen settings and return the config that results from all of them."""
        settings.update(more)
        return load_config(path, [*chosen(), *args.set], args.init_checkpoint)

    if args.architecture and (args.config or args.init_checkpoint):
        given = "--config" if args.config else "--init-checkpoint"
        problem = f"cannot be combined with {given}, which sets the architecture"
        raise ConfigError("--architecture", problem, "remove --architecture")
    if args.architecture == "modern":
        settings |= MODERN[path.stem]
    file = load_config(path, [f"{name}={value}" for name, value in settings.items()])
    if args.init_checkpoint is not None:
        settings |= _settings_of_weights(args, file.data.max_seq_length)
    if args.vocab is not None:
        settings["model.vocab_size"] = len(load_any_vocabulary(args.vocab))
    if path.stem in PASSES:
        field = args.text_field or "text"
        files, _ = find_files(
            args.text, args.vocab, text_field=field, also=args.also, out=args.data or args.out
        )
        num_bytes = text_bytes(files)
        settings["schedule.warmup_steps"] = 0  # so that the user may set any number of steps
        if args.vocab is None:
            size = 2 ** max(0, (num_bytes // BYTES_PER_WORD).bit_length() - 1)
            size = min(file.model.vocab_size, max(MIN_VOCABULARY, size))
            settings["model.vocab_size"] = size
        batch = _ranks(config_with({}), set(own), num_gpus, file.parallel.global_batch_size)
        config = config_with(batch)
        share = 1.0 if args.init_checkpoint is None else CONTINUED_SHARE
        steps = _steps(config, num_bytes * PASSES[path.stem], share)
        warm_up = min(file.schedule.warmup_steps, steps // 10)
        settings |= {"schedule.decay_steps": steps, "schedule.warmup_steps": warm_up}
    config = config_with({})
    return Plan(config_path=path, settings=chosen(), config=config, num_gpus=num_gpus)


def _settings_of_weights(args: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the settings of model, length and learning rate that initial weights require.

    Sequences have at most `length` tokens. If the user passed no vocabulary, `args.vocab` becomes
    the vocabulary of the weights.
    """
    from bert_tools.huggingface.tokenizer import vocabulary_file
    from mlperf_bert.checkpoint.first_weights import RATE_TO_CONTINUE, settings_of
    from mlperf_bert.checkpoint.manifest import read_config, resolve

    checkpoint = resolve(args.init_checkpoint)
    if args.vocab is None:
        args.vocab = vocabulary_file(checkpoint)
    model = settings_of(read_config(checkpoint).model)
    if model.get("objective") != "mlm":
        model.pop("objective", None)  # weights of both tasks can continue with masked LM only
    settings = {f"model.{name}": value for name, value in model.items()}
    settings["data.max_seq_length"] = min(length, model.get("max_position_embeddings", length))
    if args.config is None:
        settings["optim.learning_rate"] = RATE_TO_CONTINUE
    return settings


def _ranks(config: RunConfig, own: set[str], num_gpus: int, global_batch: int) -> dict[str, Any]:
    """Return the settings of ranks and batch, with a global batch of about `global_batch`.

    By default, there is one rank per GPU or CPU core. A launcher's ranks take precedence.
    """
    from mlperf_bert.distributed.launch import read_rank_info

    parallel, info = config.parallel, read_rank_info()
    nodes, on_node = parallel.nodes, num_gpus or min(MAX_CPU_RANKS, len(usable_cpus()))
    if info.world_size > 1:
        nodes, on_node = info.world_size // info.local_world_size, info.local_world_size
    elif "parallel.ranks_per_node" in own:
        on_node = parallel.ranks_per_node
    settings: dict[str, Any] = {"parallel.nodes": nodes, "parallel.ranks_per_node": on_node}
    if not own & _RANK_BATCH:
        rows = max(1, global_batch // (nodes * on_node))
        accumulated = -(-rows // parallel.local_batch_size)
        settings["parallel.local_batch_size"] = rows // accumulated
        settings["parallel.grad_accum_steps"] = accumulated
    if nodes * on_node > 1 and config.run.step_mode == "captured":
        settings["parallel.data_parallel"] = "flat"  # a capture must not contain futures
    return settings


def _steps(config: RunConfig, num_bytes: int, share: float) -> int:
    """Return how many steps read the fraction `share` of `num_bytes`, at most `decay_steps`."""
    bytes_per_step = (
        BYTES_PER_TOKEN * config.parallel.global_batch_size * config.data.max_seq_length
    )
    steps = min(config.schedule.decay_steps, max(MIN_STEPS, num_bytes // bytes_per_step))
    return max(1, int(share * steps))


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
        values |= {"segments": "single", "dupe_factor": 1}
    return CorpusRequest(
        source=args.text,
        documents=args.documents,
        text_field=args.text_field or "text",
        vocab_path=args.vocab,
        vocab_size=plan.config.model.vocab_size,
        settings=ShardSettings(seed=SEED, **values),
        also=tuple(args.also),
    )


# Time ---------------------------------------------------------------------------------------------


def _expected(plan: Plan) -> str:
    """Return one line with the expected training time, without the optimizer's updates.

    The estimate assumes full sequences.
    """
    config = plan.config
    sequences = config.max_steps * config.parallel.global_batch_size
    if plan.num_gpus:
        # 6 floating-point operations per weight and token (arXiv 2001.08361, section 2.1).
        tokens, rate = sequences * config.data.max_seq_length, GPU_FLOPS * plan.num_gpus
        seconds, how = 6 * config.model.num_parameters * tokens / rate, "assumed, not measured"
    else:
        micro_batches = config.max_steps * config.parallel.grad_accum_steps
        seconds, how = micro_batches * _micro_batch_seconds(config), "measured on synthetic text"
    return (
        f"training: {config.max_steps:,} steps, {sequences:,} sequences, about "
        f"{as_clock(seconds)} ({how}, and the progress lines will correct it)"
    )


def _micro_batch_seconds(config: RunConfig) -> float:
    """Return a rank's shortest time of a forward and backward pass on the CPU, in seconds."""
    import torch

    from mlperf_bert.distributed.launch import RankInfo, set_cpu_threads
    from mlperf_bert.model.bert import make_model
    from mlperf_bert.step.captured import synthetic_batch
    from mlperf_bert.step.eager import training_loss_sums

    ranks, device = config.parallel.ranks_per_node, torch.device("cpu")
    set_cpu_threads(RankInfo(0, ranks, 0, ranks, 0, "local"))
    model, batch = make_model(config, 0, device), synthetic_batch(config).to(device)
    taken: list[float] = []
    while len(taken) < MEASUREMENTS and sum(taken) < MEASURED_S:
        begun = time.perf_counter()
        loss = training_loss_sums(model, batch, config.model.precision).mlm
        loss.backward()  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - begun)
    return min(taken)


# Finish -------------------------------------------------------------------------------------------


def _finish(run_dir: Path, data: Path, exported: Path) -> int:
    """Measure the model of a run and export it with a model card.

    Returns 0, or TARGET_MISSED if training diverged.
    """
    from bert_tools.huggingface.export import FACTS_VERSION, PRETRAIN_FACTS, export_huggingface
    from mlperf_bert.checkpoint.manifest import read_config
    from mlperf_bert.files import write_file, write_json
    from mlperf_bert.run.outcome import read_outcome

    if (exported / CARD).exists():
        print(f"already finished, see {exported / CARD}")
        return 0
    checkpoints = run_dir / "checkpoints"
    outcome, target = read_outcome(run_dir / "outcome.json"), read_config(checkpoints).eval.target
    if target is None and outcome.status != "success":
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

    def show(done: int, of: int) -> None:
        if shown.is_due():
            shown.line(f"measured {done:,} of {of:,} batches")

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        index = open_index(data / "eval", config)
        evaluator = Evaluator.of_run(
            config, index, SampleReader(data / "eval", index.manifest), info, device
        )
        model = make_model(config, seed, device)
        if config.run.init_checkpoint:
            first = Path(config.run.init_checkpoint)
            load_weights(model, first, index.manifest.vocabulary_sha256)
        model.to(weights_dtype(config.model.precision))
        evaluator.on_batch = show
        untrained = evaluator(model).mlm_accuracy
        state = load_weights(model, checkpoints, index.manifest.vocabulary_sha256)
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
    in_session(run_rank, config.run.device, "allow", single)
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
        (candidates,) = fill(model, vocabulary, text, 3)
    except ConfigError:  # the sentence is longer than the model's limit, or it contains a mask
        return None
    predicted = ", ".join(f"{each.token} {each.probability:.2f}" for each in candidates)
    return one_line(f"{text} ({words[masked]}): {predicted}")
