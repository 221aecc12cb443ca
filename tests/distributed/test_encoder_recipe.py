"""Masked LM alone, on single segments masked anew each time: the same run however it is made.

With ModernBERT's architecture, and in longer tests with BERT's.
"""

import pytest

from forked_ranks import free_port, mpiexec_of, run_ranks
from mlperf_bert.__main__ import main
from resume_cases import DROPOUT, MISSED, MODERN, run_train
from support import metrics_losses, prepare_small, run_process, sets_of, write_synthetic_text
from test_ranks import opened, sizes, traced

LOSS_TOLERANCE = 5e-6
STEPS = 20
BERT = (
    *("model.objective=mlm", "data.masking=dynamic", "data.masking_rate=0.25"),
    *("data.max_predictions=8", *DROPOUT),
)
OURS = (*BERT, *MODERN, "optim.name=muon")


@pytest.fixture(scope="module", params=[OURS, pytest.param(BERT, marks=pytest.mark.longest)])
def recipe(request):
    """Settings of a run."""
    return request.param


@pytest.fixture(scope="module")
def data(synthetic_data, tmp_path_factory):
    """Sets of single segments, of as many words as the sets of pairs."""
    directory = tmp_path_factory.mktemp("single")
    for name, documents, seed in (("train", 150, 1), ("eval", 40, 2)):
        write_synthetic_text(directory / f"{name}.txt", documents, seed)
        prepare_small(
            [directory / f"{name}.txt"],
            synthetic_data / "words.txt",
            directory / name,
            max_seq_length=32,
            max_predictions=5,
            dupe_factor=1,
            segments="single",
            with_baseline=name == "eval",
        )
    return directory


@pytest.fixture(scope="module")
def whole(tiny_config, data, recipe, tmp_path_factory):
    """A run of one rank, which reads by itself and computes as it goes."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    saved = ("checkpoint.interval_steps=8", "checkpoint.keep_last=9")
    assert run_train(tiny_config, data, directory, *recipe, *saved) == MISSED
    assert len(metrics_losses(directory)) == STEPS
    return directory


def assert_same(found, expected):
    assert metrics_losses(found) == pytest.approx(
        metrics_losses(expected), abs=LOSS_TOLERANCE, rel=0
    )


def test_a_captured_step_on_two_ranks_that_exchange(tiny_config, data, recipe, whole, tmp_path):
    settings = (*recipe, "data.balance=exchange_global", "run.step_mode=captured")
    places = ["--config", tiny_config, "--data", data, "--run-dir", tmp_path / "run"]
    words = ["train", *places, *sets_of(*settings), *sizes(2, 8)]
    statuses, printed = run_ranks("mlperf_bert", words, 2)
    assert statuses == [MISSED, MISSED], printed
    assert_same(tmp_path / "run", whole)


@pytest.mark.real
def test_reader_processes(tiny_config, data, recipe, whole, tmp_path):
    pytest.importorskip("mpi4py")
    run_dir = tmp_path / "run"
    settings = (*recipe, "data.balance=exchange_local", "data.loader=mpi_readers")
    places = ["--config", tiny_config, "--data", data, "--run-dir", run_dir]
    done = run_process(
        *(*mpiexec_of(4), "-m", "mlperf_bert", "train", *places, *sets_of(*settings), *sizes(2, 8)),
        MASTER_PORT=free_port(),
        **traced(data, run_dir),
    )
    assert "target NOT reached after 320 samples" in done.stdout, done.stderr
    assert done.stderr == ""
    assert_same(run_dir, whole)
    before, after = opened(run_dir)
    assert "train.hdf5.json" in before  # readers prepare themselves
    assert not [name for name in before if name.endswith(".hdf5")]
    assert "train.hdf5" in {name for _, name, _ in after}


def test_it_goes_on_bit_for_bit(tiny_config, data, recipe, whole, tmp_path):
    saved = whole / "run_0/checkpoints/step_00000008"
    status = run_train(tiny_config, data, tmp_path / "run", *recipe, resume=saved)
    assert status == MISSED
    assert metrics_losses(tmp_path / "run") == metrics_losses(whole)[8:]


@pytest.mark.parametrize(
    "setting", ["model.architecture=bert", "data.masking=static", "data.masking_rate=0.2"]
)
def test_another_recipe_does_not_go_on(tiny_config, data, whole, tmp_path, setting, capsys):
    saved = whole / "run_0/checkpoints/step_00000008"
    settings = (*OURS, "model.attention_window=128", setting)
    if setting == "data.masking=static":
        settings += ("data.masking_rate=0.15",)
    status = run_train(tiny_config, data, tmp_path / "run", *settings, resume=saved)
    assert status == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"error: {setting.partition('=')[0]}: is" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_pairs_serve_masked_lm_alone(tiny_config, synthetic_data, tmp_path, masking, capsys):
    """And a model of either kind is evaluated with the masks of its held-out set."""
    settings = ("model.objective=mlm", f"data.masking={masking}", "run.max_steps=4")
    run = tmp_path / "run"
    assert run_train(tiny_config, synthetic_data, run, *settings) == MISSED
    capsys.readouterr()
    found = []
    for _ in range(2):
        checkpoint = ["--checkpoint", str(run / "run_0/checkpoints")]
        assert main(["evaluate", *checkpoint, "--data", str(synthetic_data)]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != ""


def test_single_segments_have_no_next_sentences(tiny_config, data, tmp_path, capsys):
    assert run_train(tiny_config, data, tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model.objective: 'mlm_nsp' needs sentence pairs" in said and "use 'mlm'" in said


def test_dynamic_masks_change_the_losses_and_depend_on_the_seed(
    tiny_config, data, recipe, whole, tmp_path
):
    few = ("run.max_steps=3", "schedule.decay_steps=20")
    runs = {
        "same": (),
        "seed": ("run.seed=12",),
        "static": ("data.masking=static", "data.masking_rate=0.15"),
    }
    losses = {}
    for name, settings in runs.items():
        assert run_train(tiny_config, data, tmp_path / name, *recipe, *settings, *few) == MISSED
        losses[name] = metrics_losses(tmp_path / name)
    assert losses["same"] == metrics_losses(whole)[:3]
    assert losses["seed"] != losses["same"] and losses["static"] != losses["same"]
