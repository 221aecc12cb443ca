"""What cluster_tables.py writes: the simulator beside published runs, forecasts, ranges."""

from collections.abc import Sequence
from dataclasses import replace

import calibrate
from bert_tools.plan.cluster.machine import Constants, constant_rows, default_constants
from bert_tools.plan.cluster.simulation import Question, ablation, simulate, sweep
from bert_tools.plan.forecast import Forecast, forecast
from bert_tools.plan.recipes import lamb_recipe
from bert_tools.plan.sample_index import wikipedia_index
from bert_tools.plan.suggest import expected_time, suggest
from calibrate import Compared, PublishedStep, compare, published_steps
from mlperf_bert.evaluation.convergence import expected_samples

Table = list[list[str]]

FITTED = ("matrix_efficiency", "kernel_overhead_us", "host_launch_us", "network_efficiency")
FROZEN = (0.889, 7.73, 56.3, 0.643)  # freeze.txt
ASSUMED_OFF = ("NVIDIA x1024 v1.1", "NVIDIA x4320")  # assumed to have had in-network reduction
CONFIGURED = ("NVIDIA x1024 v2.0", "NVIDIA x4096")  # whose configs name it
# Entries of the paper's abstract (arXiv 2402.02447): its own, a rival, and the ratio it gives.
RIVALS = (
    ("Samsung x1024 v1.1", "NVIDIA x1024 v1.1", 1.33),
    ("Samsung x1024 v1.1", "Azure x1024", 1.57),
    ("Samsung x1024 v2.0", "NVIDIA x1024 v2.0", 1.13),
)
CAPS_MB = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
SETS = (256, 448, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
MILLION = 1e6
# The paper's recipe on as many DGX A100 (200 GB/s a node) and on the paper's nodes (100 GB/s).
PAPER = Question(
    nodes=128,
    gpus_per_node=8,
    local_batch_size=16,
    sampler="strata_6_3_2_5",
    balance="presort_local",
    clip="bucket_before_allreduce",
    recipe="open_adam",
    start_up_s=2.15,
)
PAPER_NODES = replace(PAPER, node_gb_s=100.0)
AS_PUBLISHED = replace(
    PAPER_NODES,
    program="samsung_v2_0",
    precision="fp16",
    balance="exchange_local",
    skipped_steps=7,
)
LAMB = Question(nodes=128, gpus_per_node=8, local_batch_size=4)
MOSAIC = Question(
    nodes=1,
    gpus_per_node=8,
    local_batch_size=56,
    clip="none",
    recipe="open_adamw",
    evaluation_interval=24_640,
    start_up_s=2.15,
)


def reckoned(*, with_fits: bool) -> dict[str, Table]:
    """All tables by name; that of fits takes seconds more."""
    steps, constants = published_steps(), default_constants()
    compared = [compare(step, constants) for step in steps]
    tables = {
        "constants": _constants(steps),
        "classes": classes(compared),
        "errors": errors(compared),
        "samples": samples(compared),
        "reduction": reduction(compared),
        "predictions": _predictions(),
        "ablation": _ablation(PAPER),
        "techniques": _techniques(),
        "rivals": rivals(compared),
        "caps": _caps(),
        "sweep": _sweep(),
        "sizes": _sizes(),
        "batches": _batches(),
        "sets": sets(),
    }
    return tables | ({"fits": _fits(steps)} if with_fits else {})


def _constants(steps: Sequence[PublishedStep]) -> Table:
    weights = calibrate.sensitivity(default_constants(), steps)
    paper = {each.name: each for each in forecast(PAPER_NODES, wikipedia_index()).bounds}
    seconds = forecast(PAPER_NODES, wikipedia_index()).seconds
    table = [
        ["constant", "value", "bounds", "unit", "kind", "a tenth more changes steps by"],
    ]
    table[0] += ["the paper's run with ours at the bounds", "source"]
    for row, weight in zip(constant_rows(), weights, strict=True):
        changes, at = weight["changes"].values(), paper[row.name]
        table.append(
            [
                *(f"`{row.name}`", f"{row.value:.4g}", f"{row.low:g} to {row.high:g}"),
                *(row.unit, row.kind, f"{min(changes):+.1%} to {max(changes):+.1%}"),
                f"{seconds * at.at_low:.1f}, {seconds * at.at_high:.1f} s",
                row.source,
            ]
        )
    return table


def classes(compared: Sequence[Compared]) -> Table:
    """Steps as published and as simulated, fitted and held-out ones apart."""
    table = [["class", "accelerators", "role", "published", "simulated", "error"]]
    for each in compared:
        step = each.published
        table.append(
            [
                *(step.id, f"{step.world_size:,}", step.role.replace("_", " ")),
                *(f"{step.step_ms:.1f} ms", f"{each.predicted_ms:.1f} ms", f"{each.error:+.1%}"),
            ]
        )
    return table


def errors(compared: Sequence[Compared]) -> Table:
    """By role; and of step x samples where the class is no point of the samples itself."""
    table = [["classes", "what", "within 15 %", "mean", "largest"]]
    for role in ("fitted", "held_out", "other"):
        chosen = [each for each in compared if each.published.role == role]
        table.append([role.replace("_", " "), "step", *summary([each.error for each in chosen])])
    table.append(["held out", "step x samples", *summary(calibrate.time_errors(compared))])
    return table


def summary(errors: Sequence[float]) -> list[str]:
    """How many are good, the mean and the largest."""
    sizes = [abs(error) for error in errors]
    good = sum(size <= calibrate.GOAL for size in sizes)
    return [f"{good} of {len(sizes)}", f"{sum(sizes) / len(sizes):.1%}", f"{max(sizes):.1%}"]


def samples(compared: Sequence[Compared]) -> Table:
    """Samples as published and as expected, where these are not that very entry's."""
    table = [["class", "published", "expected", "error"]]
    for each in compared:
        expected, published = calibrate.expected(each.published), each.published.samples
        error = expected.samples / published - 1
        if abs(error) >= calibrate.IS_POINT:
            pair = (f"{value / MILLION:.2f} M" for value in (published, expected.samples))
            table.append([each.published.id, *pair, f"{error:+.1%}"])
    return table


def reduction(compared: Sequence[Compared]) -> Table:
    """Held-out classes with in-network reduction taken as off where it is not known, or at all."""
    table = [["in-network reduction", "within 15 %", "mean", "largest"]]
    for name, off in (
        ("as shipped: on in four classes", ()),
        ("off in the two of v1.1, where it is assumed", ASSUMED_OFF),
        ("off in all four, also where a config names it", ASSUMED_OFF + CONFIGURED),
    ):
        chosen = [each for each in compared if each.published.role == "held_out"]
        errors = [
            compare(without_reduction(each.published), default_constants()).error
            if each.published.id in off
            else each.error
            for each in chosen
        ]
        table.append([name, *summary(errors)])
    return table


def without_reduction(step: PublishedStep) -> PublishedStep:
    """The class as its network would be with switches that only pass on."""
    return replace(step, program=replace(step.program, in_network_reduction="off"))


def _predictions() -> Table:
    table = [["prediction", "step", "samples", "time to train", "assumed constants within bounds"]]
    table[0] += ["samples' spread too", "every constant at its worse bound"]
    on = "open Adam, our program captured, bf16, 1,024 A100"
    for name, question in (
        (f"{on} of the paper's nodes, 100 GB/s", PAPER_NODES),
        ("the same machine, published program: a fitted class (published: 22.3 s)", AS_PUBLISHED),
        (f"{on} of DGX A100, 200 GB/s", PAPER),
        ("open AdamW (MosaicML), our program, 8 A100, evaluations every 24,640", MOSAIC),
        ("closed LAMB, 4,096 sequences, our program, 1,024 A100, no start-up", LAMB),
    ):
        found = forecast(question, wikipedia_index())
        run, estimate = found.simulated.run, found.simulated.estimate
        skipped = f", {run.skipped_steps} steps skipped" if run.skipped_steps else ""
        table.append(
            [
                *(name, f"{run.step_ms:.1f} ms", f"{estimate.samples:,.0f}{skipped}"),
                f"{found.seconds:.1f} s",
                *(_range(found.step_low, found.step_high), _range(found.low, found.high)),
                _range(found.best, found.worst),
            ]
        )
    return table


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f} s"


def _ablation(question: Question) -> Table:
    index = wikipedia_index()
    table = [["exchanged", "step", "difference", "exposed", "imbalance"]]
    for row in ablation(simulate(question, index), index):
        mark = " (as asked)" if row.is_as_asked else ""
        assert row.step_ms is not None and row.difference_ms is not None
        table.append(
            [
                f"{row.technique}: {row.setting}{mark}",
                *(f"{row.step_ms:.1f} ms", f"{row.difference_ms:+.1f} ms"),
                *(f"{row.exposed_ms:.1f} ms", f"{row.imbalance_tokens:.4f}"),
            ]
        )
    return table


def _techniques() -> Table:
    """The same exchanges in other surroundings; one network, 100 GB/s a node."""
    columns = []
    small = replace(LAMB, clip="bucket_before_allreduce", node_gb_s=100.0)
    for question in (AS_PUBLISHED, PAPER_NODES, small):
        found = simulate(question, wikipedia_index())
        rows = ablation(found, wikipedia_index())
        differences = {(row.technique, row.setting): row for row in rows}
        columns.append((found.run.step_ms, differences))
    table = [["", "published program of Samsung, v2.0", "ours, captured"]]
    table[0].append("ours, captured, 4 a GPU")
    table.append(["the step", *(f"{step:.1f} ms" for step, _ in columns)])
    for name, technique, setting in (
        ("random lengths instead", "lengths", "random"),
        ("presort_global instead", "lengths", "presort_global"),
        ("clip the whole before instead of each bucket", "clip", "whole"),
        ("clip after instead of each bucket", "clip", "after"),
        ("capture on", "capture", "on"),
        ("capture off", "capture", "off"),
    ):
        found_rows = [differences[technique, setting] for _, differences in columns]
        cells = ["as asked" if r.is_as_asked else f"{r.difference_ms:+.1f} ms" for r in found_rows]
        table.append([name, *cells])
    return table


def rivals(compared: Sequence[Compared]) -> Table:
    """The paper's ratios of times, simulated, and what they are made of."""
    table = [["rival / the paper's", "published", "simulated", "seconds", "steps", "ms a step"]]
    by_id = {each.published.id: each.published for each in compared}
    for own, rival, published in RIVALS:
        pair = [by_id[name] for name in (rival, own)]
        runs = [step.run_time(default_constants()) for step in pair]
        cells = [
            " / ".join(form.format(each) for each in runs)
            for form in ("{0.seconds:.1f}", "{0.steps:,}", "{0.step_ms:.1f}")
        ]
        ratio = runs[0].seconds / runs[1].seconds
        table.append([f"{rival} / {own}", f"{published:.2f}", f"{ratio:.2f}", *cells])
    return table


def _caps() -> Table:
    """Steps of BERT-large by bucket cap, clipping each bucket; exposed communication in brackets.

    25 MiB is torch's default, whose first bucket is closed at 1 MiB.
    """
    table = [["", *(f"{cap:g} MiB" for cap in CAPS_MB)]]
    even = replace(PAPER, sampler="quantile", balance="presort_global")
    for name, question in (
        ("8 A100, 56 a GPU", replace(even, nodes=1, local_batch_size=56)),
        ("16 DGX A100, 24 a GPU", replace(even, nodes=16, local_batch_size=24)),
        ("128 DGX A100, 16 a GPU", even),
        ("128 of the paper's nodes, 16 a GPU", replace(even, node_gb_s=100.0)),
        ("128 DGX A100, 4 a GPU", replace(even, local_batch_size=4)),
        ("128 nodes of 25 GB/s, 16 a GPU", replace(even, node_gb_s=25.0)),
    ):
        found = [
            simulate(replace(question, bucket_cap_mb=cap), wikipedia_index()) for cap in CAPS_MB
        ]
        best = min(each.run.step_ms for each in found)
        cells = [
            f"{each.run.step_ms / best:.3f} ({each.mean_ms('exposed_ms'):.1f} ms)" for each in found
        ]
        table.append([name, *cells])
    return table


def _sweep() -> Table:
    table = [["accelerators", "closed LAMB, 4 a GPU: step", "to the target"]]
    table[0] += ["open Adam, 16,384 in all: step", "to the target"]
    index = wikipedia_index()
    kept = replace(PAPER, start_up_s=0.0)
    rows = {row.accelerators: row for row in sweep(LAMB, "local", index)}
    others = {row.accelerators: row for row in sweep(kept, "global", index)}
    for ranks, row in rows.items():
        cells = [f"{ranks:,}"]
        for each in (row, others.get(ranks)):
            mark = "" if each is None or each.basis in ("published", "given") else " ?"
            cells += [f"{each.step_ms:.1f} ms", f"{each.time_s:.1f} s{mark}"] if each else ["", ""]
        table.append(cells)
    return table


def _sizes() -> Table:
    table = [["nodes of 8 A100", "global batch", "samples, M", "steps", "time (range), s"]]
    table[0] += ["law", "published"]
    for nodes in (1, 2, 4, 8, 16, 32, 64, 128, 512):
        found = suggest(nodes, 8)
        time: Forecast = expected_time(found)
        published = [each.time_min or 0.0 for each in time.published]
        table.append(
            [
                *(f"{nodes}", f"{found.config.parallel.global_batch_size:,}"),
                *(f"{found.samples.samples / MILLION:.3f}", f"{found.steps:,}"),
                f"{time.seconds:,.1f} ({time.low:,.1f} to {time.high:,.1f})",
                f"{time.law_seconds:,.1f}",
                f"{60 * published[0]:,.1f}" if published else "",
            ]
        )
    return table


def _batches() -> Table:
    """Seconds to the target; empty where ranks cannot share the batch evenly."""
    batches = (3072, 4096, 4608, 6144, 8192)
    table = [["nodes", *(f"at {batch:,}" for batch in batches)]]
    for nodes in (16, 32, 64, 128):
        cells = []
        for batch in batches:
            each, rest = divmod(batch, 8 * nodes)
            question = Question(nodes=nodes, gpus_per_node=8, local_batch_size=each)
            seconds = simulate(question, wikipedia_index()).run.seconds
            cells.append("" if rest else f"{seconds:.1f}")
        table.append([str(nodes), *cells])
    return table


def sets() -> Table:
    """Hyper-parameters by batch, and the samples that the rules know of."""
    table = [["global batch", "rate", "beta 1", "beta 2", "weight decay", "warm-up", "steps"]]
    table[0] += ["reference runs", "least", "source"]
    for batch in SETS:
        recipe, reference = lamb_recipe(batch), expected_samples(batch)
        assert reference is not None, "the closed division has a point for each"
        warm_up = f"{recipe.warmup_steps} ({recipe.start_warmup_step})"
        table.append(
            [
                *(f"{batch:,}", f"{recipe.learning_rate:g}", f"{recipe.beta_1:g}"),
                *(f"{recipe.beta_2:g}", f"{recipe.weight_decay:g}"),
                *(warm_up if recipe.warmup_steps else "0", f"{recipe.decay_steps:,}"),
                *(f"{reference.mean:,.0f}", f"{reference.minimum:,.0f}", recipe.source),
            ]
        )
    return table


def _fits(steps: Sequence[PublishedStep]) -> Table:
    """Constants that were or could have been taken, and their errors on the held-out classes."""
    chosen = [step for step in steps if step.role == "fitted"]
    on = "NVIDIA x64"
    reduced = [
        replace(step, program=replace(step.program, in_network_reduction="on"))
        if step.id == on
        else step
        for step in chosen
    ]
    shipped = default_constants()
    frozen = replace(shipped, **dict(zip(FITTED, FROZEN, strict=True)))
    table = [["constants", "matrix", "kernel", "launch", "network"]]
    table[0] += ["error of the 7 fitted, root mean square", "held out within 15 %"]
    table[0] += ["mean", "largest", "the paper's run with ours"]
    for name, constants, fitted in (
        ("frozen before the comparison", frozen, chosen),
        ("shipped, fitted after it", shipped, chosen),
        ("what `--fit` finds today", calibrate.fit(shipped, chosen)[0], chosen),
        (f"the same with switches that add in {on}", calibrate.fit(shipped, reduced)[0], reduced),
    ):
        table.append([name, *_fit_row(constants, fitted, steps)])
    return table


def _fit_row(
    constants: Constants, fitted: Sequence[PublishedStep], steps: Sequence[PublishedStep]
) -> list[str]:
    values = [getattr(constants, name) for name in FITTED]
    errors = calibrate.log_errors(constants, fitted)
    held_out = [compare(each, constants).error for each in steps if each.role == "held_out"]
    seconds = simulate(PAPER_NODES, wikipedia_index(), constants).run.seconds
    return [
        *(f"{values[0]:.3f}", f"{values[1]:.2f} us", f"{values[2]:.1f} us", f"{values[3]:.3f}"),
        *(f"{float((errors**2).mean()) ** 0.5:.2%}", *summary(held_out), f"{seconds:.1f} s"),
    ]
