"""Chooses the model and the training of `pretrain` from the text, the machine and the options.

A `Plan` is the config that results. Its expected time is measured before the training starts.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.config.files import find_config, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import Precision
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.files import file_digest, write_file
from mlperf_bert.machine import bf16_instructions, usable_cpus
from mlperf_bert.run.console import ProgressLines, as_clock

RUN = "run"  # the directory in --out for the training's run
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
    on_gpus: bool

    def in_words(self) -> str:
        """Return one line that describes the chosen model."""
        model, ranks = self.config.model, self.config.parallel.world_size
        where = ("1 GPU" if ranks == 1 else f"{ranks} GPUs") if self.on_gpus else "the CPU"
        return (
            f"model: {self.config_path.stem} on {where}: {model.num_layers} layers of "
            f"{model.hidden_size}, {model.num_parameters / 1e6:,.1f} M weights, a vocabulary of "
            f"{model.vocab_size:,} tokens, sequences of up to {self.config.data.max_seq_length} "
            f"tokens, {ranks} {'rank' if ranks == 1 else 'ranks'}, in {model.precision}"
        )


def as_checkpoint(given: Path, converted: Path, vocabulary: Path | None = None) -> Path:
    """Return the initial weights as a checkpoint, converted from Hugging Face's format if needed.

    The result is `given` if that is a checkpoint, otherwise `converted`. A resumed command neither
    downloads nor converts weights again, and compares those of a directory by their digest. If the
    weights have no masked-LM head, the head is randomly initialized. `vocabulary` is that of the
    weights, or None if it is in their directory. Raises CheckpointError, ConfigError or DataError.
    """
    from bert_tools.huggingface.conversion import (
        HEAD,
        plan_conversion,
        write_checkpoint,
    )
    from bert_tools.huggingface.hub import is_origin, open_weights
    from bert_tools.huggingface.reader import REMEDY, SINGLE, is_huggingface
    from mlperf_bert.checkpoint.manifest import read_manifest
    from mlperf_bert.checkpoint.weights_directory import EITHER, check_directory, is_hub_name

    if given.exists() and not is_huggingface(given):
        return given
    digest = converted.with_name(f"{converted.name}.sha256")  # of the file that was converted
    if converted.exists():
        is_known = digest.exists() and given.exists()
        is_other = is_known and digest.read_text() != file_digest(given / SINGLE, REMEDY)
        if is_other or not is_origin(given, read_manifest(converted).origin):
            problem = f"was converted from weights other than {given}"
            raise ConfigError(str(converted), problem, "pass another --out")
        return converted
    if not is_hub_name(given):
        check_directory(given, EITHER, accepts_names=True)
    source = open_weights(given)
    with ProgressLines().never_silent(lambda: f"converting {given}"):
        plan = plan_conversion(source, vocabulary, "draw")
        write_checkpoint(plan, converted, {"format": "huggingface", **source.origin})
        if not is_hub_name(given):
            write_file(digest, file_digest(given / SINGLE, REMEDY).encode())
    head = f" (it has no {HEAD}, which is initialized at random)" if plan.drawn else ""
    print(f"converted {given} ({source.form}) to {converted}{head}", flush=True)
    return converted


def initial_weights(args: argparse.Namespace) -> Path | None:
    """Return the initial weights from the option, from `--set` or from the config, or None."""
    of_file = load_config(args.config).run.init_checkpoint if args.config else ""
    path = _own_settings(args).get("run.init_checkpoint", of_file)
    return args.init_checkpoint or (Path(path) if path else None)


def _own_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the user's own settings in `--set` by name."""
    halves = (each.partition("=") for each in args.set)
    return {name.strip(): value.strip(" '\"") for name, _, value in halves}


def choose(args: argparse.Namespace) -> Plan:
    """Choose the config, and the settings that fit the text and the machine that will train.

    The user's own settings take precedence. If run.device is "cuda", this machine needs no GPU. The
    raw size is the only property of the text that matters, so all ranks make the same choice.
    """
    import torch

    from bert_tools.pretrain.files import find_files, text_bytes
    from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary

    own = _own_settings(args)
    of_file = load_config(args.config).run.device if args.config else "auto"
    found = torch.cuda.device_count()
    num_gpus = {"cpu": 0, "cuda": found or 1}.get(own.get("run.device", of_file), found)
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
        on_node = num_gpus
        if not num_gpus:
            settings["model.precision"], on_node = on_cpu(args.out / RUN)
        settings["schedule.warmup_steps"] = 0  # so that the user may set any number of steps
        if args.vocab is None:
            size = 2 ** max(0, (num_bytes // BYTES_PER_WORD).bit_length() - 1)
            size = min(file.model.vocab_size, max(MIN_VOCABULARY, size))
            settings["model.vocab_size"] = size
        batch = _ranks(config_with({}), set(own), on_node, file.parallel.global_batch_size)
        config = config_with(batch)
        steps = _steps(config, num_bytes * PASSES[path.stem])
        warm_up = min(file.schedule.warmup_steps, steps // 10)
        settings |= {"schedule.decay_steps": steps, "schedule.warmup_steps": warm_up}
    config = config_with({})
    return Plan(config_path=path, settings=chosen(), config=config, on_gpus=num_gpus > 0)


def on_cpu(run_dir: Path) -> tuple[Precision, int]:
    """Return the precision and the number of ranks for this CPU.

    The precision is bf16_autocast if it has instructions for bf16, and there is a rank per core. A
    run that has a checkpoint keeps both, even on another machine.
    """
    from mlperf_bert.checkpoint.manifest import read_config

    try:
        config = read_config(run_dir / "run_0" / "checkpoints")
    except CheckpointError:
        ranks = min(MAX_CPU_RANKS, len(usable_cpus()))
        return ("bf16_autocast" if bf16_instructions() else "fp32"), ranks
    return config.model.precision, config.parallel.ranks_per_node


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
    theirs = read_config(checkpoint).model
    model = settings_of(theirs)
    if model.get("objective") != "mlm":
        model.pop("objective", None)  # weights of both tasks can continue with masked LM only
    settings = {f"model.{name}": value for name, value in model.items()}
    settings["data.max_seq_length"] = min(length, model.get("max_position_embeddings", length))
    if args.config is None:
        settings["optim.learning_rate"] = RATE_TO_CONTINUE
        if theirs.architecture == "modern":  # which is published without dropout
            for name in ("hidden_dropout", "attention_dropout"):
                settings[f"model.{name}"] = getattr(theirs, name)
    return settings


def _ranks(config: RunConfig, own: set[str], on_node: int, global_batch: int) -> dict[str, Any]:
    """Return the settings of ranks and batch, with a global batch of about `global_batch`.

    There are `on_node` ranks per node, unless a launcher or the user chose another number.
    """
    from mlperf_bert.distributed.launch import read_rank_info

    parallel, info = config.parallel, read_rank_info()
    nodes = parallel.nodes
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


def _steps(config: RunConfig, num_bytes: int) -> int:
    """Return how many steps read `num_bytes`, at most `decay_steps`.

    If the weights are already trained, return a fraction CONTINUED_SHARE of these steps.
    """
    bytes_per_step = (
        BYTES_PER_TOKEN * config.parallel.global_batch_size * config.data.max_seq_length
    )
    steps = min(config.schedule.decay_steps, max(MIN_STEPS, num_bytes // bytes_per_step))
    return max(1, int(CONTINUED_SHARE * steps)) if config.run.init_checkpoint else steps


def expected(plan: Plan) -> str:
    """Return one line with the expected training time, without the optimizer's updates.

    The estimate assumes full sequences.
    """
    config = plan.config
    sequences = config.max_steps * config.parallel.global_batch_size
    if plan.on_gpus:
        # 6 floating-point operations per weight and token (arXiv 2001.08361, section 2.1).
        work = 6 * config.model.num_parameters * sequences * config.data.max_seq_length
        seconds = work / (GPU_FLOPS * config.parallel.world_size)
        how = "assumed, not measured"
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
