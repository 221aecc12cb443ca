"""Fine-tuning engines on 4 ranks over gloo: all give what one rank gives; bubbles are as known."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bert_tools.squad.batches import UpdatePlan, WindowReader
from bert_tools.squad.engines import Team, TimedStage, make_engine, make_schedule, score_windows
from bert_tools.squad.loop import Loop
from bert_tools.squad.measures import Span, StageClock, measured_bubble
from bert_tools.squad.model import Start, draw_weights, make_part, whole
from forked_ranks import as_rank, what_ranks_saw
from squad_cases import SMALL, made_up_windows, small_settings

CPU = torch.device("cpu")
UPDATES = 30
FIRST = 15  # of them, of cases that show a schedule or another number of ranks
EXACT = {"precision": "fp64", "noise_every": 15}
SINGLE = {"precision": "fp32"}
DROPPED = {
    **{"precision": "fp64", "dropout": 0.1, "updates": 10, "noise_every": 5},
}
KINDS = {"fp64": EXACT, "fp32": SINGLE, "dropout": DROPPED}
OTHER_CUT = {"fsdp:2": 2, "ddp:4": 8}  # microbatches: fsdp is slow on a CPU, four ranks share eight
# What runs beside each other, on ranks from 0 up. A case whose third word is "first" ends early.
WAVES = (
    ("single fp64", "single fp32", "single dropout", "single fp64 first"),
    ("ddp:2 fp64", "ddp:2 fp32"),
    ("pipeline:2 fp64", "pipeline:2 fp32"),
    ("pipeline:2@gpipe fp64 first", "pipeline:2@interleaved fp64 first"),
    ("pipeline:2@zero_bubble fp64 first", "fsdp:2 fp64"),
    ("fsdp:2 fp32", "pipeline:2 dropout"),
    ("ddp:2 dropout", "fsdp:2 dropout"),
    ("ddp:4 fp64 first",),
    ("pipeline:4 fp64",),
    ("pipeline:4 fp32",),
)
# That a stage sleeps for a microbatch; backward twice as long. What a busy machine adds to each
# sleep is about the same whatever its length, so longer sleeps have less of it: they are taken
# where shorter ones do not do.
FORWARDS_S = (0.03, 0.06, 0.12, 0.24, 0.48)
TOLERANCE = 0.05
SLEEPERS = ((2, (2, 4, 8)), (4, (4, 8)))  # stages, microbatches


def run_case(case, mesh, rank, output):
    """A short run of one engine, as a rank of it."""
    name, kind, *early = case.split()
    changes = dict(KINDS[kind])
    dropout = changes.pop("dropout", 0.0)
    if name in OTHER_CUT and kind != "dropout":  # the same sums
        changes |= {"microbatches": OTHER_CUT[name], "noise_every": 0}
    settings = small_settings(name, **{"updates": UPDATES, **changes})
    model = replace(SMALL, hidden_dropout=dropout, attention_dropout=dropout)
    windows = made_up_windows(40)
    reader = WindowReader(windows)
    plan = UpdatePlan.make(windows.lengths, settings)
    team, clock = Team(mesh), StageClock(rank)
    start = Start(model, draw_weights(model, 3), "")
    engine = make_engine(settings, start, plan, team, CPU, clock)
    last = FIRST if early else settings.num_updates(40)
    loop = Loop(settings, engine, plan, reader.batch, clock)
    log = loop.run(stopped=lambda update: "enough" if update == last else None)
    learnt = engine.weights()
    whole_model = make_part(model, whole(model), learnt, CPU, settings.precision)
    scores = score_windows(whole_model, windows, team)
    if team.rank == 0:
        found = {
            "losses": log.losses,
            "grad_norms": log.grad_norms,
            "noise": log.noise,
            "clocked": len(log.clocked),
            "scores": scores.tolist(),
            "weights": {name: float(each.double().sum()) for name, each in learnt.items()},
        }
        (output / f"{case}.json").write_text(json.dumps(found))


class Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad.clone(), torch.zeros(()), None


class Sleeper(nn.Module):
    """A stage of a pipeline that needs no processor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = 0.0

    def forward(self, x):
        slept = Sleep.apply(x, self.weight, self.seconds)
        return slept


def known_bubble(stages, microbatches):
    """That of GPipe and 1F1B with equal stages, without communication (arXiv 2104.04473)."""
    return (stages - 1) / (microbatches + stages - 1)


def bubble_of(schedule, stages, microbatches, group):
    """The smallest bubble of some updates, as a busy machine only adds to it."""
    rank = dist.get_rank(group)
    clock = StageClock(rank)
    example = torch.zeros((1, 4), requires_grad=True)
    examples = (example,)
    sleeper = Sleeper()
    stage = TimedStage(
        *(clock, sleeper, rank, stages, CPU), input_args=examples, output_args=examples, group=group
    )
    of_torch = make_schedule(schedule, [stage], microbatches)
    enough = known_bubble(stages, microbatches) + 0.6 * TOLERANCE
    least = 1.0
    for seconds in FORWARDS_S:
        sleeper.seconds = seconds
        dist.barrier(group)
        clock.start()
        rows = (torch.ones((microbatches, 4)),) if rank == 0 else ()
        losses = []
        target = torch.zeros(microbatches)
        of_torch.step(*rows, target=target, losses=losses, return_outputs=False)
        own = torch.tensor(
            [(event.begin_s, event.end_s) for event in clock.stop()], dtype=torch.float64
        )
        of_ranks = [torch.zeros_like(own) for _ in range(stages)]
        dist.all_gather(of_ranks, own, group=group)
        events = [
            Span(rank=of, stage=of, kind="F", microbatch=0, begin_s=begin, end_s=end)
            for of, spans in enumerate(of_ranks)
            for begin, end in spans.tolist()
        ]
        least = min(least, measured_bubble(events))
        if least < enough:
            break
    return least


def bubbles(rank):
    """Smallest ones by name; GPipe on the first ranks beside 1F1B on the last, where both fit."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everybody = dist.new_group([0, 1, 2, 3])
    found = {}
    schedules = ("gpipe", "1f1b")
    for stages, counts in SLEEPERS:
        for count in counts:
            for number, schedule in enumerate(schedules):
                name = f"{schedule} {stages} {count}"
                if stages == 4:
                    found[name] = bubble_of(schedule, stages, count, everybody)
                elif rank // 2 == number:
                    found[name] = bubble_of(schedule, stages, count, pairs[number])
    return found


pytestmark = pytest.mark.timeout(900)  # of minutes on a machine that does much else
RANKS = 4
CASES = [case for wave in WAVES for case in wave]
WITHIN = {"fp64": 1e-10, "dropout": 1e-10, "fp32": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("squad")
    imports = ["bert_tools.squad.fine_tune"]
    seen = what_ranks_saw(__file__, (), RANKS, output, imports=imports, timeout_s=800)
    by_rank = {f"bubbles_{rank}": each for rank, each in enumerate(seen)}
    return by_rank | {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}


def single(case):
    """The case of the same kind on one rank."""
    return f"single {case.partition(' ')[2]}"


def difference(found, case, key):
    """The largest, absolute, to one rank's of the same kind."""
    ours, alone = (found[each][key] for each in (case, single(case)))
    assert np.shape(ours) == np.shape(alone)
    return float(np.abs(np.array(ours) - np.array(alone)).max())


@pytest.mark.parametrize("case", [each for each in CASES if "single" not in each])
def test_losses_are_those_of_one_rank(found, case):
    kind = case.split()[1]
    losses = found[case]["losses"]
    updates = FIRST if case.endswith("first") else 10 if kind == "dropout" else UPDATES
    assert len(losses) == updates
    assert difference(found, case, "losses") < WITHIN[kind]
    assert difference(found, case, "grad_norms") < 100 * WITHIN[kind]
    assert difference(found, case, "scores") < 1e-4  # stored in float32


def test_the_runs_learn_and_dropout_drops(found):
    losses = found["single fp64"]["losses"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    dropped = found["single dropout"]["losses"]
    assert np.abs(np.array(dropped) - np.array(losses[:10])).min() > 1e-4


@pytest.mark.parametrize("case", [each for each in CASES if "fp64" in each])
def test_weights_are_gathered_from_all_ranks(found, case):
    ours, alone = found[case]["weights"], found[single(case)]["weights"]
    assert list(ours) == list(alone)
    assert max(abs(ours[name] - alone[name]) for name in alone) < 1e-8


@pytest.mark.parametrize("case", [each for each in CASES if "fp32" not in each])
def test_noise_is_measured_alike(found, case):
    noise, alone = found[case]["noise"], found[single(case)]["noise"]
    expected = [5, 10] if "dropout" in case else [15, 30]
    assert [each["update"] for each in alone] == (expected[:1] if "first" in case else expected)
    if case.split()[0] in OTHER_CUT and "fp64" in case:  # the halves would be others
        assert noise == []
        return
    assert len(noise) == len(alone)
    for ours, theirs in zip(noise, alone, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-6), key


def test_pipelines_are_clocked(found):
    for case in CASES:
        ends_before = "pipeline" not in case or case.endswith("first")
        expected = 0 if ends_before else 1 if "dropout" in case else 3
        assert found[case]["clocked"] == expected


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(stages, count) for stages, each in SLEEPERS for count in each]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_is_that_of_the_formula(found, schedule, stages, microbatches):
    name = f"{schedule} {stages} {microbatches}"
    of_ranks = [found[f"bubbles_{rank}"].get(name) for rank in range(RANKS)]
    measured = [each for each in of_ranks if each is not None]
    assert len(measured) == stages and len(set(measured)) == 1
    assert abs(measured[0] - known_bubble(stages, microbatches)) < TOLERANCE


def all_cases(info, output):
    """Wave after wave; rank 0 of each engine leaves a file by its case's name. The bubbles seen."""
    for wave in WAVES:
        first = 0
        mine = None
        for case in wave:
            engine = small_settings(case.split()[0]).engine
            ranks = torch.arange(first, first + engine.ranks)
            mesh = DeviceMesh("cpu", ranks)  # every rank must make every one, in the same order
            if first <= info.rank < first + engine.ranks:
                mine = case, mesh if engine.ranks > 1 else None
            first += engine.ranks
        if mine is not None:
            run_case(*mine, info.rank, output)
    return bubbles(info.rank)


if __name__ == "__main__":
    output = Path(sys.argv[1])
    as_rank(lambda info: all_cases(info, output), output)
