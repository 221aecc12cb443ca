"""`bench against`: our training step and `transformers`' on the same samples, and their ratios.

The headline compares ours with the strongest of the others on this machine. Beside it stands the
MFU of each: the published count of operations, for real tokens and masked positions only, over time
and over the rate of matrix products measured between the steps. Ours computes the last layer only
where it is read, so its MFU by the operations really done stands beside.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_tools.bench.flops import PER_MULTIPLY_ADD, done_flops, model_flops
from bert_tools.bench.peer import (
    CLIP,
    OPTIM,
    OPTIMIZER_IN_WORDS,
    Compiled,
    Data,
    autocast_dtype,
    import_transformers,
    is_modern,
    make_other_peers,
    make_peer,
    masked_inputs,
    masked_loss,
    padded_inputs,
    peer_step,
)
from bert_tools.bench.synthetic import synthetic_samples
from bert_tools.bench.timing import (
    Contender,
    InterleavedTimes,
    free_memory,
    reason_of,
    seconds_of,
)
from bert_tools.bench.training_run import (
    Update,
    own_stream,
    run_of_model,
)
from bert_tools.common.length_histogram import real_lengths, run_shapes
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection, Precision, ScheduleSection
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.shards import IntArray, Samples
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import COMPUTED_IN, BertForPretraining
from mlperf_bert.model.heads import pretraining_loss
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.eager import training_loss_sums

NUM_BATCHES = 4  # distinct ones; each is measured several times
WINDOW = 50  # batches within which the other side sorts, as `transformers` does (group_by_length)
PRODUCT_SIZES = (1024, 2048)  # of square matrices: one of them is near the machine's limit
CUDA_PRODUCTS = 50  # in a turn: one takes a fraction of a millisecond
LARGEST_LOSS_DIFFERENCE = 1e-5
LARGEST_CUDA_DIFFERENCE = 1e-4  # fp32 too, but products are summed in other orders
LARGEST_ROUNDED_DIFFERENCE = 0.05  # difference of a loss near 10, in 16 bits or fewer
PEER_ATTENTIONS = {
    "bert": ("sdpa", "eager"),
    "modern": ("sdpa",),  # eager: NaN where a window holds padding alone
}
PRODUCT = "matrix_products"  # takes turns like all contenders
OTHERS = MappingProxyType(  # names of the contenders, in words
    {
        "sorted": "masked positions, sorted by length",
        "sorted_compiled": "the same through torch.compile",
        "padded_to_longest": "masked positions, padded to the longest",
        "padded": "as people feed it: all positions, padded to the maximum",
        "padded_compiled": "the same through torch.compile",
        "padded_flash": "the same with fused attention",
        "unpadded_peer": "without padding, all positions",
    }
)


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
    compile: bool,
    by_layer: bool,
) -> dict[str, Any]:
    """The JSON object of `bench against`, from at most `steps` steps per side.

    Once every batch was measured, no further step begins after `seconds`. The other side also goes
    through torch.compile, whole or `by_layer`, unless `compile` is false; in precisions other than
    fp32 it keeps fp32 weights and runs under autocast. Raises ConfigError if transformers is
    missing, or the two sides' losses differ.
    """
    import_transformers()
    config = as_both_train(config)
    with own_stream(device):
        updates, by_length = mixed_and_sorted(config, min(NUM_BATCHES, steps))
        data = make_data(config, updates, by_length, device)
        compiled: Compiled = ("by layer" if by_layer else "whole") if compile else "no"
        found = _compared(config, updates, data, device, report, steps, seconds, compiled)
        return {**found, "compiled": compiled}


def as_both_train(config: RunConfig) -> RunConfig:
    """The config with settings that both sides have: optimizer, clipping, rate, one forward."""
    return replace(
        config,
        parallel=replace(config.parallel, grad_accum_steps=1),
        optim=OPTIM,
        schedule=ScheduleSection(
            decay_steps=config.max_steps, end_learning_rate=OPTIM.learning_rate
        ),
        clip=CLIP,
        mlperf=replace(config.mlperf, enforce_rules=False),
    )


def mixed_and_sorted(config: RunConfig, count: int) -> tuple[list[Update], list[UnpaddedBatch]]:
    """`count` updates of one forward, and as many batches of the same samples dealt by length.

    The published lengths of WINDOW batches are sorted and cut into batches. `count` evenly spread
    ones are taken, and their samples are mixed for the updates.
    """
    size, data, seed = config.parallel.local_batch_size, config.data, int(config.run.seed)
    lengths = real_lengths(WINDOW * size, data.max_seq_length, derive_seed(seed, "lengths"))
    evenly = (2 * np.arange(count) + 1) * WINDOW // (2 * count)
    chosen = np.sort(lengths).reshape(WINDOW, size)[evenly].ravel()
    samples = [
        synthetic_samples(
            chosen[number : number + 1],
            vocab_size=config.model.vocab_size,
            max_predictions=data.max_predictions,
            seed=derive_seed(seed, "samples", number),
            masking_rate=data.masking_rate,
        )
        for number in range(len(chosen))
    ]

    def batch(ids: IntArray) -> UnpaddedBatch:
        parts = {
            each.name: np.concatenate([getattr(samples[i], each.name) for i in ids])
            for each in fields(Samples)
        }
        num_masked = float(parts["masked_counts"].sum())
        return make_batch(
            Samples(**parts), ids, mlm_denominator=num_masked, nsp_denominator=float(size)
        )

    by_length = np.arange(len(chosen)).reshape(count, size)
    mixed = np.random.default_rng(derive_seed(seed, "order")).permutation(len(chosen))
    return [(batch(ids),) for ids in mixed.reshape(count, size)], [batch(ids) for ids in by_length]


def make_data(
    config: RunConfig, updates: list[Update], by_length: list[UnpaddedBatch], device: torch.device
) -> Data:
    """The batches of `mixed_and_sorted`, on the device, for both sides."""
    batches = [batch.to(device) for (batch,) in updates]
    by_length = [batch.to(device) for batch in by_length]
    kind = config.model.architecture
    return Data(
        batches=batches,
        by_length=by_length,
        padded=[padded_inputs(batch, config.data.max_seq_length, kind) for batch in batches],
        padded_to_longest=[masked_inputs(batch, kind) for batch in batches],
        sorted=[masked_inputs(batch, kind) for batch in by_length],
    )


def _compared(
    config: RunConfig,
    updates: list[Update],
    data: Data,
    device: torch.device,
    report: Callable[[str], None],
    steps: int,
    seconds: float,
    compiled: Compiled,
) -> dict[str, Any]:
    model, seed = config.model, int(config.run.seed)
    exact = make_ours(exact_model(model), seed, device)
    peer = make_peer(exact, model, device)
    loss_difference = check_same_loss(exact, peer, data)
    product, product_flops = matrix_product(device, COMPUTED_IN[model.precision])
    report(f"equal weights, same samples, no dropout: losses differ by {loss_difference:.1e}")
    expected = loss_without_dropout(exact, data.batches[0])
    theirs = make_contenders(peer, data, model.precision)
    peer_attention = fastest_attention(peer, theirs["sorted"], len(data.batches), report)
    ours = exact if model.precision == "fp32" else make_ours(model, seed, device)
    # Before ours is trained, as all get its weights.
    torch.manual_seed(derive_seed(seed, "dropout"))
    others = make_other_peers(
        partial(make_peer, exact, model, device, attention=peer_attention),
        data,
        model.precision,
        device=device,
        architecture=model.architecture,
        compiled=compiled,
        check=lambda loss: check_loss(loss, expected, model),
        report=report,
    )
    del exact
    shapes = run_shapes(config) if config.run.step_mode == "captured" else ()
    with run_of_model(ours, config, updates, shapes) as run:
        check_loss(loss_without_dropout(ours, data.batches[0]), expected, model)
        report("measuring")
        all_of_them: dict[str, Contender] = {
            "ours": run,
            **theirs,
            **others.contenders,
            PRODUCT: product,
        }
        may_fail = all_of_them.keys() - {"ours", PRODUCT}
        times = InterleavedTimes(all_of_them, len(data.batches), may_fail=may_fail)
        # A contender out of memory is freed, so nothing else may hold it.
        del peer, theirs, all_of_them
        others.contenders.clear()
        times.run_once()
        times.measure(num_steps=steps, seconds=seconds, report=report)
        return {
            **_measured(times, others.reasons | times.reasons, config, data, product_flops),
            **_facts(config, data),
            "device": device.type,
            "steps": times.num_steps,
            "loss_difference": loss_difference,
            "ours_attention": ours.attention.name,
            "ours_padding_share": run.padding_share,
            "padded_attention": peer_attention,
        }


def _measured(
    times: InterleavedTimes,
    reasons: dict[str, str],
    config: RunConfig,
    data: Data,
    product_flops: float,
) -> dict[str, Any]:
    """Rates, MFU, ratios and reasons; None for contenders that do not run.

    A ratio is the number of our samples per sample of the other side; its range, the lowest, median
    and highest over visits of all batches, shows how steady the machine was.
    """
    batch_size = config.parallel.local_batch_size
    rates = {name: batch_size / times.seconds_per_batch(name) for name in times.names}
    peak = product_flops / times.seconds_per_batch(PRODUCT)
    model, num_samples = config.model, batch_size * len(data.batches)
    useful, done = (
        sum(each.total for each in flops) / num_samples
        for flops in (
            [model_flops(model, batch.lengths, batch.masked_counts) for batch in data.batches],
            [done_flops(model, batch) for batch in data.batches],
        )
    )
    others = {name: rates[name] for name in OTHERS if name in rates}
    strongest = max(others, key=others.__getitem__, default=None)
    found: dict[str, Any] = {
        "schema_version": 2,
        "strongest": strongest,
        "peak_tflops": peak / 1e12,
        "peak_dtype": str(COMPUTED_IN[model.precision]).removeprefix("torch."),
        "gflop_per_sequence": useful / 1e9,
        "ours_done_mfu": rates["ours"] * done / peak,
    }
    for name in ("ours", *OTHERS):
        rate = rates.get(name)
        found[f"{name}_samples_per_s"] = rate
        found[f"{name}_mfu"] = None if rate is None else rate * useful / peak
        if name != "ours":
            found[f"{name}_reason"] = reasons.get(name)
            found[f"ratio_{name}"] = None if rate is None else rates["ours"] / rate
            if rate is not None:
                found[f"ratio_{name}_range"] = times.range_of_ratios(name, "ours")
    found["ratio_strongest"] = None if strongest is None else found[f"ratio_{strongest}"]
    return found


def _facts(config: RunConfig, data: Data) -> dict[str, Any]:
    """The question asked, as keys of the JSON object."""
    model, dtype = config.model, autocast_dtype(config.model.precision)
    lengths = [length for batch in data.batches for length in batch.lengths]
    return {
        "mean_length": sum(lengths) / len(lengths),
        "max_length": config.data.max_seq_length,
        "batch": config.parallel.local_batch_size,
        "architecture": model.architecture,
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
        "threads": torch.get_num_threads(),
        "distinct_batches": len(data.batches),
        "torch": torch.__version__,
        "transformers": import_transformers().__version__,
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{'ModernBERT: ' if result['architecture'] == 'modern' else ''}"
        f"{result['layers']} layers, hidden {result['hidden']}, {result['heads']} heads, "
        f"{result['vocabulary']} words, batch {result['batch']}, {result['precision']} on "
        f"{result['device']}, {result['threads']} threads",
        f"mean length {result['mean_length']:.1f} of at most {result['max_length']}, "
        f"{result['distinct_batches']} batches, {result['steps']} steps of each, dropout "
        f"{result['dropout']}, {result['optimizer']}",
        "a step is forward, backward and update, its batch ready",
        f"attention: ours {result['ours_attention']}, transformers' {result['padded_attention']}; "
        f"our step is {result['ours_step_mode']}; their compiled forms: {result['compiled']}",
    ]
    lines += [
        f"matrix products of {result['peak_dtype']} in {result['peak_tflops'] * 1e3:.0f} GFLOP/s",
        f"{_row('our step', result, 'ours')}; {result['ours_done_mfu']:.2f} by what it computes",
    ]
    for name, text in OTHERS.items():
        if result[f"{name}_samples_per_s"] is None:
            lines.append(f"{text}: not measured ({result[f'{name}_reason']})")
            continue
        low, middle, high = result[f"ratio_{name}_range"]
        lines.append(
            f"{_row(text, result, name)}  ours is {result[f'ratio_{name}']:.2f} times that "
            f"(rounds {low:.2f} .. {middle:.2f} .. {high:.2f})"
        )
    if result["strongest"] is not None:
        text = OTHERS[result["strongest"]]
        lines.append(f"ours / the strongest ({text}): {result['ratio_strongest']:.2f}")
    return "\n".join(lines)


def _row(text: str, result: dict[str, Any], name: str) -> str:
    rate, mfu = result[f"{name}_samples_per_s"], result[f"{name}_mfu"]
    return f"{text:56} {rate:9.2f} samples/s, MFU {mfu:.2f}"


def make_contenders(peer: Any, data: Data, precision: Precision) -> dict[str, Contender]:
    """Whole steps of the other side, by contender."""
    full = peer_step(peer, lambda inputs: peer(**inputs).loss, precision)
    masked = peer_step(peer, partial(masked_loss, peer), precision)
    return {
        "sorted": lambda number: masked(data.sorted[number]),
        "padded_to_longest": lambda number: masked(data.padded_to_longest[number]),
        "padded": lambda number: full(data.padded[number]),
    }


def matrix_product(device: torch.device, dtype: torch.dtype) -> tuple[Contender, float]:
    """The fastest square product, repeated until its start does not count; and its operations."""
    times = CUDA_PRODUCTS if device.type == "cuda" else 1

    def of_size(size: int) -> tuple[Contender, float]:
        x, y, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))

        def run(_: int) -> Tensor:
            for _ in range(times):
                torch.mm(x, y, out=out)
            return out[0, 0]

        return run, PER_MULTIPLY_ADD * size**3 * times

    found = [of_size(size) for size in PRODUCT_SIZES]
    rates = [max(flops / seconds_of(run, 0) for _ in range(3)) for run, flops in found]
    return found[int(np.argmax(rates))]


def fastest_attention(
    peer: Any, step: Contender, num_batches: int, report: Callable[[str], None]
) -> str:
    """Set `peer` to its attention implementation with the fastest steps, and return the name.

    One that fails, for want of memory or in its own code, is skipped.
    """
    attentions = PEER_ATTENTIONS["modern" if is_modern(peer) else "bert"]
    report(f"trying each attention of transformers: {', '.join(attentions)}")
    seconds = dict.fromkeys(attentions, float("inf"))
    for name in attentions:
        peer.set_attn_implementation(name)
        try:
            step(-1).item()
            seconds[name] = sum(seconds_of(step, number) for number in range(num_batches))
        except RuntimeError as error:
            report(f"{name}: {reason_of(error)}")
        free_memory()
    fastest = min(seconds, key=seconds.__getitem__)
    peer.set_attn_implementation(fastest)
    report(f"fastest is {fastest}")
    return fastest


def make_ours(model: ModelSection, seed: int, device: torch.device) -> BertForPretraining:
    """Our model in training mode. Its padded words, which the other side lacks, get no weight.

    At BERT's own initializer range of 0.02 attention is nearly uniform, and the losses would not
    reveal a wrong attention; at hidden ** -0.5 they do.
    """
    model = replace(model, initializer_range=model.hidden_size**-0.5)
    ours = BertForPretraining(model, device, seed=derive_seed(seed, "weights"))
    ours.dropout_seed = derive_seed(seed, "dropout")
    with torch.no_grad():
        ours.decoder_bias[model.vocab_size :] = -1e4
    return ours


def exact_model(model: ModelSection) -> ModelSection:
    """The model in fp32, which shows whether two models are equal; unchanged if already fp32."""
    if model.precision == "fp32":
        return model
    return replace(model, precision="fp32", attention="reference", kernels="reference")


@torch.no_grad()
def loss_without_dropout(ours: BertForPretraining, batch: UnpaddedBatch) -> Tensor:
    """Loss of our model without dropout."""
    ours.eval()
    loss = pretraining_loss(training_loss_sums(ours, batch, ours.config.precision), batch)
    ours.train()
    return loss


@torch.no_grad()
def check_same_loss(ours: BertForPretraining, peer: Any, data: Data) -> float:
    """Largest difference of the first batch's losses in nats, without dropout.

    Compares every attention of the other side with ours, all positions and masked ones, in fp32.
    Raises ConfigError if they differ (`check_loss`): times of different models mean nothing.
    """
    mixed, by_length = (
        loss_without_dropout(ours, batch) for batch in (data.batches[0], data.by_length[0])
    )
    peer.eval()
    differences = []
    for attention in PEER_ATTENTIONS[ours.config.architecture]:
        peer.set_attn_implementation(attention)
        losses = (
            (peer(**data.padded[0]).loss, mixed),
            (masked_loss(peer, data.padded_to_longest[0]), mixed),
            (masked_loss(peer, data.sorted[0]), by_length),
        )
        differences += [check_loss(loss, expected, ours.config) for loss, expected in losses]
    peer.train()
    return max(differences)


def check_loss(loss: Tensor, expected: Tensor, model: ModelSection) -> float:
    """Difference of two losses in nats.

    Raises ConfigError if it exceeds rounding in the model's precision on its device.
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
