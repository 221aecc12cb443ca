"""Fine-tuning engines on 2 and 4 ranks over gloo: all give what one rank gives."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from bert_tools.squad.batches import UpdatePlan, WindowReader
from bert_tools.squad.engines import RankMesh, make_engine, score_windows
from bert_tools.squad.loop import Loop
from bert_tools.squad.measures import StageClock
from bert_tools.squad.model import Start, draw_weights, make_part, whole
from forked_ranks import as_rank, what_ranks_saw
from squad_cases import SMALL, made_up_windows, small_settings

CPU = torch.device("cpu")
UPDATES = 30
FIRST = 15  # of them, of cases that show a schedule or another number of ranks
KINDS = {
    "fp64": {"precision": "fp64", "noise_every": 15},
    "fp32": {"precision": "fp32"},
    "dropout": {"precision": "fp64", "dropout": 0.1, "updates": 10, "noise_every": 5},
}
OTHER_CUT = {"fsdp:2": 2, "ddp:4": 8}  # microbatches: fsdp is slow on a CPU, four ranks share eight
# What runs beside each other, on ranks from 0 up, by the number of ranks. A case whose third word
# is "first" ends early.
OF_TWO = ("ddp:2", "fsdp:2", *(f"pipeline:2{at}" for at in ("", "@gpipe", "@interleaved")))
WAVES = {
    2: (
        ("single fp64", "single fp64 first"),
        ("single dropout",),
        ("pipeline:2 dropout",),
        *((f"{engine} fp64 first",) for engine in (*OF_TWO, "pipeline:2@zero_bubble")),
    ),
    4: (
        ("single fp64", "single fp32", "single dropout", "single fp64 first"),
        ("ddp:2 fp64", "ddp:2 fp32"),
        ("pipeline:2 fp64", "fsdp:2 fp64"),
        ("pipeline:2 fp32", "fsdp:2 fp32"),
        ("ddp:2 dropout", "fsdp:2 dropout"),
        ("ddp:4 fp64 first",),
        ("pipeline:4 fp64",),
        ("pipeline:4 fp32",),
    ),
}


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
    mesh, clock = RankMesh(mesh), StageClock(rank)
    start = Start(model, draw_weights(model, 3), "")
    engine = make_engine(settings, start, plan, mesh, CPU, clock)
    last = FIRST if early else settings.num_updates(40)
    loop = Loop(settings, engine, plan, reader.batch, clock)
    log = loop.run(stopped=lambda update: "enough" if update == last else None)
    learnt = engine.weights()
    whole_model = make_part(model, whole(model), learnt, CPU, settings.precision)
    scores = score_windows(whole_model, windows, mesh)
    if mesh.rank == 0:
        found = {
            "losses": log.losses,
            "grad_norms": log.grad_norms,
            "noise": log.noise,
            "clocked": len(log.clocked),
            "scores": scores.tolist(),
            "weights": {name: float(each.double().sum()) for name, each in learnt.items()},
        }
        (output / f"{case}.json").write_text(json.dumps(found))


pytestmark = pytest.mark.timeout(900)  # of minutes on a machine that does much else
WITHIN = {"fp64": 1e-10, "dropout": 1e-10, "fp32": 1e-5}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.longest)])
def ranks(request):
    """How many."""
    return request.param


@pytest.fixture(scope="module")
def cases(ranks):
    return [case for wave in WAVES[ranks] for case in wave]


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    """What each case left, by its name."""
    output = tmp_path_factory.mktemp("squad")
    imports = ["bert_tools.squad.fine_tune"]
    what_ranks_saw(__file__, (), ranks, output, imports=imports, timeout_s=800)
    return {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}


def single(case):
    """The case of the same kind on one rank."""
    return f"single {case.partition(' ')[2]}"


def difference(found, case, key):
    """The largest, absolute, to one rank's of the same kind."""
    ours, alone = (found[each][key] for each in (case, single(case)))
    assert np.shape(ours) == np.shape(alone)
    return float(np.abs(np.array(ours) - np.array(alone)).max())


def test_engines_give_what_one_rank_gives(found, cases):
    for case in cases:
        kind = case.split()[1]
        updates = FIRST if case.endswith("first") else 10 if kind == "dropout" else UPDATES
        assert len(found[case]["losses"]) == updates, case
        assert difference(found, case, "losses") < WITHIN[kind], case
        assert difference(found, case, "grad_norms") < 100 * WITHIN[kind], case
        assert difference(found, case, "scores") < 1e-4, case  # stored in float32
        ours, alone = found[case]["weights"], found[single(case)]["weights"]
        assert list(ours) == list(alone)
        if kind != "fp32":
            assert max(abs(ours[name] - alone[name]) for name in alone) < 1e-8, case


def test_the_runs_learn_and_dropout_drops(found):
    losses = found["single fp64"]["losses"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    dropped = found["single dropout"]["losses"]
    assert np.abs(np.array(dropped) - np.array(losses[:10])).min() > 1e-4


def test_noise_is_measured_alike(found, cases):
    for case in (each for each in cases if "fp32" not in each):
        noise, alone = found[case]["noise"], found[single(case)]["noise"]
        expected = [5, 10] if "dropout" in case else [15, 30]
        assert [each["update"] for each in alone] == expected[: 1 if "first" in case else 2]
        if case.split()[0] in OTHER_CUT and "fp64" in case:  # the halves would be others
            assert noise == []
            continue
        assert len(noise) == len(alone)
        for ours, theirs in zip(noise, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6), case


def test_pipelines_are_clocked(found, cases):
    for case in cases:
        ends_before = "pipeline" not in case or case.endswith("first")
        expected = 0 if ends_before else 1 if "dropout" in case else 3
        assert found[case]["clocked"] == expected


def all_cases(info, output):
    """Wave after wave; rank 0 of each engine leaves a file by its case's name."""
    for wave in WAVES[info.world_size]:
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


if __name__ == "__main__":
    output = Path(sys.argv[1])
    as_rank(lambda info: all_cases(info, output), output)
