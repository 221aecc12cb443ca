"""`squad train` and `compare` as a user calls them, on a tiny model."""

import json

import pytest

from bert_tools.squad.comparison import RESULT, read_run
from bert_tools.squad.settings import QUICK_DEV
from mlperf_bert.__main__ import main
from support import contents, refusal

TINY = ("--layers", 2, "--hidden", 16, "--max-length", 64, "--stride", 24, "--device", "cpu")
RUN = ("--updates", 3, "--microbatches", 4, "--noise-every", 2)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of three updates by one rank."""
    directory = tmp_path_factory.mktemp("squad") / "run"
    assert squad("train", *TINY, *RUN, "--run-dir", directory) == 0
    return directory


def squad(*words):
    """Run `squad ...` in this process; its status."""
    return main(["squad", *map(str, words)])


def test_a_run_is_not_written_over(run_dir, capsys):
    before = contents(run_dir)
    other = ("--train", QUICK_DEV, "--updates", 1, "--run-dir", run_dir)
    assert "squad_result.json" in refusal(capsys, "squad", "train", *TINY, *other)
    assert contents(run_dir) == before


@pytest.mark.longest
def test_two_engines_are_compared_on_real_ranks(run_dir, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the ranks
    out = tmp_path / "out"
    # The run of one rank has ended before.
    kept = out / "runs" / "single-batch_16-seed_1"
    kept.mkdir(parents=True)
    (kept / RESULT).write_bytes((run_dir / RESULT).read_bytes())
    words = ("--engines", "single,pipeline:2", "--seeds", 1, "--out", out, "--json")
    assert squad("compare", *TINY, *RUN, *words) == 0
    captured = capfd.readouterr()
    assert "run 2 of 2: pipeline:2, batch 16, seed 1" in captured.err
    assert "1 of 2" not in captured.err
    single, pipeline = json.loads(captured.out)["engines"]
    assert (single["engine"], pipeline["engine"]) == ("single", "pipeline:2")
    assert pipeline["loss_difference"] < 1e-5
    assert pipeline["values"]["efficiency"]["mean"] == 1.0
    assert 0 < pipeline["values"]["bubble_measured"]["mean"] < 100
    assert (out / "timeline.png").exists()
    (run,) = (read_run(path) for path in (out / "runs").glob("pipeline*"))
    begins = [span["begin_s"] for span in run["timeline"]]
    assert begins == sorted(begins) and {span["rank"] for span in run["timeline"]} == {0, 1}
