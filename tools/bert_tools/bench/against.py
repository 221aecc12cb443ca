"""`bench against`: our training step and `transformers`' on the same samples, and their ratios.

Shape letters: B sequences, S padded length, T tokens, D hidden.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bert_tools.bench.peer import (
    BUILDERS,
    CLIP,
    OPTIM,
    OPTIMIZER_IN_WORDS,
    Data,
    OtherPeers,
    autocast,
    autocast_dtype,
    import_transformers,
    make_other_peers,
    make_peer,
    padded_inputs,
    peer_step,
)
from bert_tools.bench.timing import Contender, InterleavedTimes, free_memory, seconds_of
from bert_tools.bench.training_run import (
    TrainingRun,
    Update,
    own_stream,
    run_of_model,
    run_updates,
)
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection, ScheduleSection
from mlperf_bert.data.length_histogram import run_shapes
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import pretraining_loss
from mlperf_bert.step.eager import training_loss_sums

NUM_BATCHES = 4  # distinct ones; each is measured several times
LARGEST_LOSS_DIFFERENCE = 1e-5
LARGEST_CUDA_DIFFERENCE = 1e-4  # fp32 too, but products are summed in other orders
LARGEST_ROUNDED_DIFFERENCE = 0.05  # of a loss near 10, in 16 bits or fewer
PEER_ATTENTIONS = ("sdpa", "eager")
RATIOS = {  # name: our contender, the other side's
    "ratio_padded": ("ours", "padded"),
    "ratio_padded_to_longest": ("ours", "padded_to_longest"),
    "ratio_encoder": ("ours_encoder", "padded_encoder"),
    **{f"ratio_{name}": ("ours", name) for name in BUILDERS},
}
_ROWS = (  # name of what is timed, ours over that, in words
    ("ours", None, "our step"),
    ("padded", "ratio_padded", "transformers, padded to the maximum"),
    ("padded_to_longest", "ratio_padded_to_longest", "transformers, padded to the longest"),
    ("ours_encoder", None, "our encoder alone"),
    ("padded_encoder", "ratio_encoder", "transformers' encoder alone, padded"),
    ("padded_compiled", "ratio_padded_compiled", "transformers, padded and compiled"),
    ("padded_flash", "ratio_padded_flash", "transformers, padded, fused attention"),
    ("unpadded_peer", "ratio_unpadded_peer", "transformers without padding"),
)


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
    compile: bool | None,
) -> dict[str, Any]:
    """The JSON object of `bench against`, of at most `steps` steps a side.

    No further one begins after `seconds`, once every batch was measured. The other side goes
    through torch.compile as well where `compile` says so, by default on CUDA; in another precision
    than fp32 it keeps fp32 weights and runs under autocast. Raises ConfigError when transformers is
    missing, or when the two sides' losses differ.
    """
    import_transformers()
    config = as_both_train(config)
    with_compile = device.type == "cuda" if compile is None else compile
    with own_stream(device):
        updates = run_updates(config, min(NUM_BATCHES, steps))
        data = make_data(config, updates, device)
        return _compared(config, updates, data, device, report, steps, seconds, with_compile)


def as_both_train(config: RunConfig) -> RunConfig:
    """The config with what both sides have: optimizer, clipping, a constant rate, one forward."""
    return replace(
        config,
        parallel=replace(config.parallel, grad_accum_steps=1),
        optim=OPTIM,
        schedule=ScheduleSection(decay_steps=config.max_steps, power=0.0),
        clip=CLIP,
        mlperf=replace(config.mlperf, enforce_rules=False),
    )


def make_data(config: RunConfig, updates: list[Update], device: torch.device) -> Data:
    """The batches of updates of one forward, on the device, for both sides."""
    batches = [batch.to(device) for (batch,) in updates]
    return Data(
        batches=batches,
        padded=[padded_inputs(batch, config.data.max_seq_length) for batch in batches],
        padded_to_longest=[padded_inputs(batch, batch.max_seqlen) for batch in batches],
    )


def _compared(
    config: RunConfig,
    updates: list[Update],
    data: Data,
    device: torch.device,
    report: Callable[[str], None],
    steps: int,
    seconds: float,
    with_compile: bool,
) -> dict[str, Any]:
    model, seed = config.model, int(config.run.seed)
    exact = make_ours(exact_model(model), seed, device)
    peer = make_peer(exact, model, device)
    loss_difference = check_same_loss(exact, peer, data)
    report(f"equal weights, same samples, no dropout: losses differ by {loss_difference:.1e}")
    expected = loss_without_dropout(exact, data)
    ours = exact if model.precision == "fp32" else make_ours(model, seed, device)
    # Before ours is trained: all get its weights.
    torch.manual_seed(derive_seed(seed, "dropout"))
    others = make_other_peers(
        partial(make_peer, exact, model, device),
        data,
        model.precision,
        device=device,
        with_compile=with_compile,
        check=lambda loss: check_loss(loss, expected, model),
        report=report,
    )
    del exact
    shapes = run_shapes(config) if config.run.step_mode == "captured" else ()
    with run_of_model(ours, config, updates, shapes) as run:
        check_loss(loss_without_dropout(ours, data), expected, model)
        contenders = make_contenders(run, peer, data)
        report(f"trying each attention of transformers: {', '.join(PEER_ATTENTIONS)}")
        peer_attention = fastest_attention(peer, contenders["padded"])
        report(f"fastest is {peer_attention}; measuring")
        all_of_them = contenders | others.contenders
        may_fail = all_of_them.keys() - {"ours"}
        times = InterleavedTimes(all_of_them, len(data.batches), may_fail=may_fail)
        # What runs out of memory is freed: here alone nothing else may hold it.
        del peer, contenders, all_of_them
        others.contenders.clear()
        times.run_once()
        times.measure(num_steps=steps, seconds=seconds, report=report)
        return {
            **_measured(times, others, config.parallel.local_batch_size),
            **_facts(config, data),
            "device": device.type,
            "threads": torch.get_num_threads(),
            "steps": times.num_steps,
            "distinct_batches": len(data.batches),
            "loss_difference": loss_difference,
            "ours_attention": ours.attention.name,
            "ours_padding_share": run.padding_share,
            "padded_attention": peer_attention,
            "torch": torch.__version__,
            "transformers": import_transformers().__version__,
        }


def _measured(times: InterleavedTimes, others: OtherPeers, batch_size: int) -> dict[str, Any]:
    """Rates, ratios and reasons; None for what does not run.

    A ratio is how many samples we do while the other side does one; its range is the lowest, median
    and highest of two neighbours in time: how steady the machine was.
    """
    reasons = others.reasons | times.reasons
    rates = {name: batch_size / times.seconds_per_batch(name) for name in times.names}
    found: dict[str, Any] = {"schema_version": 1}
    for name in dict.fromkeys(name for pair in RATIOS.values() for name in pair):
        found[f"{name}_samples_per_s"] = rates.get(name)
        if name != "ours":
            found[f"{name}_reason"] = reasons.get(name)
    for ratio, (ours, theirs) in RATIOS.items():
        found[ratio] = None
        if {ours, theirs} <= rates.keys():
            found[ratio] = rates[ours] / rates[theirs]
            found[f"{ratio}_range"] = times.range_of_ratios(theirs, ours)
    return found


def _facts(config: RunConfig, data: Data) -> dict[str, Any]:
    """What was asked for, as the JSON object has it."""
    model, dtype = config.model, autocast_dtype(config.model.precision)
    lengths = [length for batch in data.batches for length in batch.lengths]
    return {
        "mean_length": sum(lengths) / len(lengths),
        "max_length": config.data.max_seq_length,
        "batch": config.parallel.local_batch_size,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "vocabulary": model.vocab_size,
        "dropout": model.hidden_dropout,
        "precision": model.precision,
        "seed": config.run.seed,
        "ours_step_mode": config.run.step_mode,
        "padded_autocast": None if dtype is None else str(dtype).removeprefix("torch."),
        "optimizer": OPTIMIZER_IN_WORDS,
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['layers']} layers, hidden {result['hidden']}, {result['heads']} heads, "
        f"{result['vocabulary']} words, batch {result['batch']}, {result['precision']} on "
        f"{result['device']}, {result['threads']} threads",
        f"mean length {result['mean_length']:.1f} of at most {result['max_length']}, "
        f"{result['distinct_batches']} batches, {result['steps']} steps of each, dropout "
        f"{result['dropout']}, {result['optimizer']}",
        "a step is forward, backward and update, its batch ready; an encoder's is forward and "
        "backward",
        f"attention: ours {result['ours_attention']}, transformers' {result['padded_attention']}; "
        f"our step is {result['ours_step_mode']}",
    ]
    for name, ratio, text in _ROWS:
        rate = result[f"{name}_samples_per_s"]
        if rate is None:
            continue
        times = ""
        if ratio and result[ratio] is not None:
            low, middle, high = result[f"{ratio}_range"]
            times = f"  ours is {result[ratio]:.2f} times that"
            times += f" (single steps {low:.1f} .. {middle:.1f} .. {high:.1f})"
        lines.append(f"{text:36} {rate:9.2f} samples/s{times}")
    lines += [
        f"{text}: not measured ({result[f'{name}_reason']})"
        for name, _, text in _ROWS
        if result[f"{name}_samples_per_s"] is None
    ]
    return "\n".join(lines)


def make_contenders(ours: TrainingRun, peer: Any, data: Data) -> dict[str, Contender]:
    """Whole steps and encoders (forward and backward), by the name of what is timed."""
    step = peer_step(peer, lambda inputs: peer(**inputs).loss, ours.config.model.precision)
    return {
        "ours": ours,
        "padded": lambda number: step(data.padded[number]),
        "padded_to_longest": lambda number: step(data.padded_to_longest[number]),
        **_encoders(ours.model, peer, data),
    }


def fastest_attention(peer: Any, step: Contender) -> str:
    """Set `peer` to that of its attention implementations whose step is fastest, and name it.

    One that runs out of memory is not.
    """
    seconds = dict.fromkeys(PEER_ATTENTIONS, float("inf"))
    for name in PEER_ATTENTIONS * 2:  # then warmed up; the lower counts, as noise only adds
        peer.set_attn_implementation(name)
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds[name] = min(seconds[name], seconds_of(step, 0))
        free_memory()
    fastest = min(seconds, key=seconds.__getitem__)
    peer.set_attn_implementation(fastest)
    return fastest


def _encoders(ours: BertForPretraining, peer: Any, data: Data) -> dict[str, Contender]:
    """Forward and backward of embeddings and all layers, every token's output computed.

    The other side's computes padding too.
    """
    batches, device = data.batches, data.batches[0].input_ids.device
    names = ("input_ids", "token_type_ids", "attention_mask")
    inputs = [{name: padded[name] for name in names} for padded in data.padded]
    gradients = [
        [torch.randn(*ids.shape, peer.config.hidden_size, device=device) for ids in each]
        for each in (
            [batch.input_ids for batch in batches],
            [padded["input_ids"] for padded in inputs],
        )
    ]

    def contender(
        model: nn.Module,
        dtype: torch.dtype | None,
        hidden_of: Callable[[int], Tensor],
        gradients: list[Tensor],
    ) -> Contender:
        def run(number: int) -> Tensor:
            try:
                with autocast(device, dtype):
                    hidden = hidden_of(number)
                torch.autograd.backward(hidden, gradients[number].to(hidden.dtype))
            finally:
                model.zero_grad()
            return hidden.detach().flatten()[0]

        return run

    precision = ours.config.precision
    return {
        "ours_encoder": contender(
            ours,
            torch.bfloat16 if precision == "bf16_autocast" else None,
            lambda number: ours.bert(batches[number], ours.dropout_keys(batches[number])),
            gradients[0],
        ),
        "padded_encoder": contender(
            peer,
            autocast_dtype(precision),
            lambda number: peer.bert(**inputs[number]).last_hidden_state,
            gradients[1],
        ),
    }


def make_ours(model: ModelSection, seed: int, device: torch.device) -> BertForPretraining:
    """Our model in training mode. Its padded words, which the other side lacks, get no chance.

    At BERT's own initializer range of 0.02 attention is nearly uniform, and the losses would not
    tell another attention; at hidden ** -0.5 they do.
    """
    model = replace(model, initializer_range=model.hidden_size**-0.5)
    ours = BertForPretraining(model, device, seed=derive_seed(seed, "weights"))
    ours.dropout_seed = derive_seed(seed, "dropout")
    with torch.no_grad():
        ours.cls.predictions.bias[model.vocab_size :] = -1e4
    return ours


def exact_model(model: ModelSection) -> ModelSection:
    """The same in fp32, in which two models can be told from one: as it is where it is in fp32."""
    if model.precision == "fp32":
        return model
    return replace(model, precision="fp32", attention="reference", kernels="reference")


@torch.no_grad()
def loss_without_dropout(ours: BertForPretraining, data: Data) -> Tensor:
    """Of our model on the first batch."""
    batch = data.batches[0]
    ours.eval()
    loss = pretraining_loss(training_loss_sums(ours, batch, ours.config.precision), batch)
    ours.train()
    return loss


@torch.no_grad()
def check_same_loss(ours: BertForPretraining, peer: Any, data: Data) -> float:
    """How far the losses of the first batch are apart in nats at most, without dropout.

    Every attention of the other side is held against ours, on both of its paddings, all in fp32.
    Raises ConfigError where they differ (`check_loss`): times of different models mean nothing.
    """
    our_loss = loss_without_dropout(ours, data)
    peer.eval()
    differences = []
    for attention in PEER_ATTENTIONS:
        peer.set_attn_implementation(attention)
        for inputs in (data.padded[0], data.padded_to_longest[0]):
            differences.append(check_loss(peer(**inputs).loss, our_loss, ours.config))
    peer.train()
    return max(differences)


def check_loss(loss: Tensor, expected: Tensor, model: ModelSection) -> float:
    """How far two losses are apart in nats.

    Raises ConfigError above what rounding can do, in the model's precision and on its device.
    """
    limit = LARGEST_LOSS_DIFFERENCE if loss.device.type == "cpu" else LARGEST_CUDA_DIFFERENCE
    if model.precision != "fp32":
        limit = LARGEST_ROUNDED_DIFFERENCE
    difference = float((loss - expected).abs())
    if not difference <= limit:
        raise ConfigError(
            "bench against",
            f"with equal weights the two losses differ by {difference:.1e}",
            "nothing is compared; use a version of transformers that the tests pass with",
        )
    return difference
