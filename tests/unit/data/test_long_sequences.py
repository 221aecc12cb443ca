"""Own text in sequences of up to 8,192 tokens, masked at 30 %: more than 255 masks a sample."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bert_tools.common.length_histogram import run_shapes
from bert_tools.own_text.prepare import OwnText
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.batch import IGNORED, make_batch
from mlperf_bert.data.capacity import plan_shapes
from mlperf_bert.data.index import LengthIndex, Manifest, ShardSettings, masked_count_table
from mlperf_bert.data.loader import DirectSource, Loader, Staging
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.set_checks import open_index
from mlperf_bert.data.shards import SampleReader
from own_texts import WORDS, make
from resume_cases import run_train
from support import metrics_losses, refusal
from verify_cases import problems, sign

LONGEST, MOST, RATE = 8192, 2458, 0.3
DOCUMENTS = 16
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
OPENINGS = [f"opening{name}" for name in "abcdefghijklmnop"]
CPU = torch.device("cpu")

CONFIG = f"""
[run]
max_steps = 2
seed = 11
device = "cpu"
step_mode = "captured"
log_interval_steps = 1
[model]
vocab_size = {len(SPECIAL) + 1 + len(WORDS) + DOCUMENTS}
hidden_size = 8
num_layers = 1
num_heads = 1
intermediate_size = 8
max_position_embeddings = {LONGEST}
objective = "mlm"
[data]
max_seq_length = {LONGEST}
max_predictions = {MOST}
masking = "dynamic"
masking_rate = {RATE}
[parallel]
local_batch_size = 2
[optim]
name = "adamw"
learning_rate = 1e-3
[schedule]
decay_steps = 2
[eval]
target_accuracy = "none"
interval_samples = 4
[mlperf]
enforce_rules = false
"""


def document(number, num_sentences):
    """Sentences that all begin with the document's own word."""
    rng = random.Random(number)
    opening = OPENINGS[number % DOCUMENTS].capitalize()
    lines = (rng.choices(WORDS, k=rng.randint(8, 30)) for _ in range(num_sentences))
    return " ".join(f"{opening} {' '.join(words)}." for words in lines)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """train/ and eval/ of long and short documents, with a tokenizer's file; not to be changed."""
    directory = tmp_path_factory.mktemp("long")
    words = [*SPECIAL, ".", *WORDS, *OPENINGS]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "text").mkdir()
    for number in range(DOCUMENTS):
        text = document(number, 3 if number % 4 == 3 else 440)
        (directory / "text" / f"{number:02}.txt").write_text(text)
    wanted = OwnText(
        source=directory / "text",
        documents="file",
        text_field="text",
        vocab_path=directory / "tokenizer.json",
        vocab_size=300,
        settings=ShardSettings(
            max_seq_length=LONGEST,
            max_predictions=MOST,
            dupe_factor=1,
            seed=12345,
            segments="single",
        ),
    )
    return make(wanted, directory / "out")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def config(config_file):
    return load_config(config_file)


def reader_of(set_dir):
    return SampleReader(set_dir, Manifest.load(set_dir))


def read(reader, ids):
    return make_batch(reader.read(ids), ids, mlm_denominator=1.0, nsp_denominator=1.0)


def original(batch):
    """The tokens before masking."""
    is_used = batch.labels != IGNORED
    found = batch.input_ids.clone()
    found[batch.masked_token_index[is_used]] = batch.labels[is_used]
    return found


def test_sentences_of_one_document_fill_a_sequence(pair):
    assert problems(pair, full=True) == ""
    openings = 6 + len(WORDS) + np.arange(DOCUMENTS)
    for name, passes in (("train", 1), ("eval", 2)):
        rests = Counter[int]()
        reader, index = reader_of(pair / name), LengthIndex.open(pair / name)
        for sample in range(reader.manifest.num_samples):
            batch = read(reader, np.array([sample]))
            (of_document,) = np.intersect1d(original(batch), openings)  # of one alone
            rests[of_document] += index.lengths[sample] < LONGEST - 32  # a sentence would fit
        assert max(rests.values()) == passes
        table = masked_count_table(LONGEST, MOST, 0.15)
        assert np.array_equal(index.masked_counts, table[index.lengths])
        assert index.manifest.format_version == 3 and index.masked_counts.dtype == np.uint16
        assert LONGEST - 32 < index.lengths.max() <= LONGEST and index.masked_counts.max() > 1220
        assert index.lengths.min() < 100  # a short document stays a short sequence


def test_dynamic_masks_are_planned_drawn_and_padded(pair, config):
    set_dir, index = pair / "train", open_index(pair / "train", config)
    reader = reader_of(set_dir)
    planner = make_planner(config, index, seed=1)
    table = masked_count_table(LONGEST, MOST, RATE)
    assert table[-1] == MOST
    plans = [planner.plan(step) for step in (1, 2)]
    for plan in plans:
        wanted = sum(table[index.lengths[plan.sample_ids]].tolist())
        assert plan.num_masked.item() == wanted > 255
    limits = {"max_seqlen": LONGEST, "max_masked": MOST}
    shapes = plan_shapes(planner, 2, **limits)
    assert shapes[-1].masked == max(plan.num_masked.item() for plan in plans)
    masks = DynamicMasks(set_dir, reader.manifest, rate=RATE, max_predictions=MOST, seed=5)
    source = DirectSource(reader, 0, masks)
    with Loader(planner, source, CPU, staging=Staging(CPU, shapes=shapes)) as loader:
        for plan, got in zip(plans, loader, strict=False):
            (batch,) = got.micro_batches
            (unpadded,) = source.micro_batches(plan)
            ids = plan.ids_of(0, 0)
            assert unpadded.masked_counts == tuple(table[index.lengths[ids]].tolist())
            is_used = batch.labels != IGNORED
            assert torch.equal(batch.labels[is_used], unpadded.labels)
            assert torch.equal(batch.masked_token_index[is_used], unpadded.masked_token_index)
            stored = read(reader, ids)
            assert torch.equal(original(unpadded), original(stored))
            assert torch.equal(original(batch)[: len(stored.input_ids)], original(stored))
            assert len(batch.labels) == batch.shape.masked >= plan.num_masked.item()


def test_a_run_trains_and_evaluates(pair, config_file, tmp_path):
    assert run_train(config_file, pair, tmp_path / "run") == 0
    guess = np.log(len(SPECIAL) + 1 + len(WORDS) + DOCUMENTS)
    assert metrics_losses(tmp_path / "run") == pytest.approx([guess, guess], rel=0.02)


def test_published_lengths_are_planned_with_the_rate(config):
    half = replace(config, data=replace(config.data, masking="static", masking_rate=0.15))
    masked, fewer = (run_shapes(each)[-1].masked for each in (config, half))
    assert masked == pytest.approx(2 * fewer, rel=0.01)


def test_a_count_above_the_most_is_one_line(pair, tmp_path, config_file, capsys):
    spoiled = Path(shutil.copytree(pair, tmp_path / "pair"))
    path = spoiled / "train" / "index" / "masked_counts.u16"
    path.write_bytes(b"\x9b\x09" + path.read_bytes()[2:])  # 2,459
    sign(spoiled / "train")
    problem = "masked_counts.u16: holds numbers outside 1 .. 2458"
    words = ("train", "--config", config_file, "--data", spoiled, "--run-dir", tmp_path / "run")
    assert problem in refusal(capsys, *words)
    assert problem in problems(spoiled / "train", full=True)
