"""What test_squad_engines.py runs on 4 ranks at once: `squad_job.py OUTPUT`.

Rank 0 of each engine writes OUTPUT/<case>.json: losses and noise of a short run; and each rank the
bubbles of pipelines whose stages sleep. Engines of one or two ranks run beside each other.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))  # of squad_cases

from bert_tools.squad.batches import UpdatePlan, WindowReader
from bert_tools.squad.bubble import Span, StageClock, bubble_by_formula, measured_bubble
from bert_tools.squad.engines import (
    REPLICA,
    STAGE,
    Team,
    TimedStage,
    make_engine,
    make_schedule,
)
from bert_tools.squad.evaluation import score_windows
from bert_tools.squad.loop import Loop
from bert_tools.squad.model import draw_weights
from bert_tools.squad.settings import Schedule
from bert_tools.squad.weights import Start
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
from squad_cases import SMALL, made_up_windows, small_settings

CPU = torch.device("cpu")
UPDATES = 50
FIRST = 15  # of them, of cases that show a schedule or another number of ranks
EXACT: dict[str, Any] = {"precision": "fp64", "noise_every": 15}
SINGLE: dict[str, Any] = {"precision": "fp32"}
DROPPED: dict[str, Any] = {
    **{"precision": "fp64", "dropout": 0.1, "updates": 10, "noise_every": 5},
}
KINDS = {"fp64": EXACT, "fp32": SINGLE, "dropout": DROPPED}
# What runs beside each other, on ranks from 0 up. A case whose third word is "first" ends early.
WAVES: tuple[tuple[str, ...], ...] = (
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
    ("pipeline:2xddp:2 fp64",),
    ("pipeline:2xddp:2 fp32",),
)
# That a stage sleeps for a microbatch; backward twice as long. What a busy machine adds to each
# sleep is about the same whatever its length, so longer sleeps have less of it: they are taken
# where shorter ones do not do.
FORWARDS_S = (0.03, 0.06, 0.12, 0.24, 0.48)
TOLERANCE = 0.05
SLEEPERS = ((2, (2, 4, 8)), (4, (4, 8)))  # stages, microbatches


def run_case(case: str, mesh: DeviceMesh | None, rank: int, output: Path) -> None:
    """A short run of one engine, as a rank of it."""
    name, kind, *early = case.split()
    changes = dict(KINDS[kind])
    dropout = changes.pop("dropout", 0.0)
    if name.startswith("fsdp") and kind != "dropout":  # slow on a CPU; another cut, the same sums
        changes |= {"microbatches": 2, "noise_every": 0}
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
    scores = score_windows(engine, windows)
    learnt = engine.weights()
    if team.is_first:
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad.clone(), torch.zeros(()), None


class Sleeper(nn.Module):
    """A stage of a pipeline that needs no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return slept


def bubble_of(
    schedule: Schedule, stages: int, microbatches: int, group: dist.ProcessGroup
) -> float:
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
    by_formula = bubble_by_formula(schedule, stages, microbatches)
    assert by_formula is not None
    enough = by_formula + 0.6 * TOLERANCE
    least = 1.0
    for seconds in FORWARDS_S:
        sleeper.seconds = seconds
        dist.barrier(group)
        clock.start()
        rows = (torch.ones((microbatches, 4)),) if rank == 0 else ()
        losses: list[Tensor] = []
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


def bubbles(rank: int) -> dict[str, float]:
    """Smallest ones by name; GPipe on the first ranks beside 1F1B on the last, where both fit."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everybody = dist.new_group([0, 1, 2, 3])
    found: dict[str, float] = {}
    schedules: tuple[Schedule, Schedule] = ("gpipe", "1f1b")
    for stages, counts in SLEEPERS:
        for count in counts:
            for number, schedule in enumerate(schedules):
                name = f"{schedule} {stages} {count}"
                if stages == 4:
                    found[name] = bubble_of(schedule, stages, count, everybody)
                elif rank // 2 == number:
                    found[name] = bubble_of(schedule, stages, count, pairs[number])
    return found


def main(output: Path) -> int:
    """Do everything, wave after wave."""

    def work(info: RankInfo, device: torch.device) -> int:
        for wave in WAVES:
            first = 0
            mine: tuple[str, DeviceMesh | None] | None = None
            for case in wave:
                engine = small_settings(case.split()[0]).engine
                ranks = torch.arange(first, first + engine.ranks)
                grid = ranks.view(engine.replicas, engine.stages)
                # Every rank must make every mesh, in the same order.
                mesh = DeviceMesh("cpu", grid, mesh_dim_names=(REPLICA, STAGE))
                if first <= info.rank < first + engine.ranks:
                    mine = case, mesh if engine.ranks > 1 else None
                first += engine.ranks
            if mine is not None:
                run_case(*mine, info.rank, output)
        (output / f"bubbles_{info.rank}.json").write_text(json.dumps(bubbles(info.rank)))
        return 0

    return in_session(work, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
