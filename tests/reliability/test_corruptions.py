"""Each corruption of prepared data is found as the table in docs/guides/prepare_data.md says."""

import pytest
import torch

from corruptions import CARELESS, FOUND, GROUPS, MIXED, NOT_REACHED, UNSEEN, table
from forked_starts import start_each
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.loader import DirectSource
from mlperf_bert.data.set_checks import ContentsCheck, open_data
from mlperf_bert.errors import DataError, UserError
from mlperf_bert.evaluation.evaluate import HeldOutBatches
from support import REPOSITORY, sets_of
from verify_cases import check, copy_of, make_pair

ALL = [one for group in GROUPS.values() for one in group]
SIZES = [
    "data.max_seq_length=64",
    "data.max_predictions=10",
    "model.max_position_embeddings=64",
    "data.sampler=quantile",
]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def config(tiny_config):
    return load_config(tiny_config, SIZES)


def train(config, data):
    """Plan and read a whole epoch and the held-out set, and hash the shards, as training does."""
    planner = make_planner(config, data.train, seed=1)
    source = DirectSource(data.train_reader, rank=0)
    batches = -(-data.train.manifest.num_samples // config.parallel.global_batch_size)
    for step in range(1, batches + 1):
        source.micro_batches(planner.plan(step))
    held_out = HeldOutBatches(
        data.held_out,
        data.held_out_reader,
        num_tokens=600,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
    )
    held_out.fill()
    with ContentsCheck((data.train_reader, data.held_out_reader)) as contents:
        contents.result()


def detect(config, pair):
    """The messages of start, `verify`, `verify --full` and training; "" where nothing was found."""
    start = training = ""
    try:
        data = open_data(config, pair, checks_files=True)
    except UserError as error:
        start = str(error)
    else:
        try:
            train(config, data)
        except DataError as error:
            training = str(error)
    fast, full = (
        "\n".join(map(str, check(pair, full=is_full).problems)) for is_full in (False, True)
    )
    return start, fast, full, training


def test_the_good_pair_passes_everything(config, good):
    assert detect(config, good) == ("", "", "", "")


@pytest.mark.parametrize("corruption", ALL, ids=lambda one: one.name)
def test_a_corruption_is_found_and_its_file_named(corruption, config, good, tmp_path):
    pair = copy_of(good, tmp_path)
    corruption.do(pair)
    start, fast, full, training = detect(config, pair)
    marks = [FOUND if text else UNSEEN for text in (start, fast, full, training)]
    if start:
        marks[3] = NOT_REACHED
    assert tuple(marks) == corruption.found, (start, fast, full, training)
    for text in filter(None, (start, fast, full)):
        assert corruption.where in text
    if corruption in (*MIXED, *CARELESS):
        assert "SHA-256 differs" not in fast + full  # what is found is the corruption itself
    for line in filter(None, (start, training)):
        assert line.isprintable()
    assert not training or corruption.where in training or str(pair / "train") in training


def test_all_are_found_by_the_full_check_and_documented():
    assert all(one.found[2] == FOUND for one in ALL)
    assert len({one.name for one in ALL}) == len(ALL) >= 40
    text = (REPOSITORY / "docs" / "guides" / "prepare_data.md").read_text(encoding="utf-8")
    assert table() in text, f"put this into docs/guides/prepare_data.md:\n{table()}"


def test_ranks_behind_the_first_of_a_node_check_what_they_use(config, good, tmp_path):
    pair = copy_of(good, tmp_path)
    (pair / "train" / "vocab.txt").unlink()  # no rank needs it
    open_data(config, pair, checks_files=False)
    with pytest.raises(DataError, match=r"vocab\.txt"):
        open_data(config, pair, checks_files=True)


@pytest.mark.real
def test_the_program_ends_in_one_line_or_trains_on(tiny_config, good, tmp_path):
    steps = -(-Manifest.load(good / "train").num_samples // 16)  # an epoch: every sample is read
    options = ["--config", tiny_config, *sets_of(*SIZES, f"run.max_steps={steps}")]
    for number, corruption in enumerate(ALL):
        (tmp_path / str(number)).mkdir()
        pair = copy_of(good, tmp_path / str(number))
        corruption.do(pair)
        places = ("--data", pair, "--run-dir", tmp_path / str(number) / "run")
        (done,) = start_each([("train", *options, *places)])
        if FOUND in (corruption.found[0], corruption.found[3]):
            assert done.status == 2, (corruption.name, done)
            errors = [line for line in done.printed.splitlines() if "mlperf_bert: error: " in line]
            assert len(errors) == 1 and "Traceback" not in done.printed, (corruption.name, done)
        else:
            assert done.status in (0, 3), (corruption.name, done)
