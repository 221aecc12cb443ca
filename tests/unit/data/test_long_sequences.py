"""Own text in sequences of up to 8,192 tokens, masked at 30 %: more than 255 masks a sample."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from bert_tools.common.length_histogram import run_shapes
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.index import LengthIndex, Manifest, masked_count_table
from mlperf_bert.data.loader import DirectSource
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.set_checks import open_data, open_index
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import DataError
from own_texts import WORDS
from resume_cases import run_train
from shard_sets import originals
from support import metrics_losses, prepare_small
from verify_cases import problems, sign

LONGEST, MOST, RATE = 8192, 2458, 0.3
DOCUMENTS = 16
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
OPENINGS = [f"opening{name}" for name in "abcdefghijklmnop"]

SETTINGS = (
    *("run.max_steps=2", "run.step_mode=captured", "parallel.local_batch_size=2"),
    *("model.num_layers=1", "model.num_heads=1", "model.hidden_size=8"),
    *("model.intermediate_size=8", f"model.vocab_size={6 + len(WORDS) + DOCUMENTS}"),
    *("model.objective=mlm", f"model.max_position_embeddings={LONGEST}"),
    *(f"data.max_seq_length={LONGEST}", f"data.max_predictions={MOST}"),
    *("data.masking=dynamic", f"data.masking_rate={RATE}"),
    *("schedule.warmup_steps=0", "schedule.decay_steps=2"),
    *("eval.target_accuracy=none", "eval.interval_samples=4"),
)


def document(number, num_sentences):
    """Sentences that all begin with the document's own word."""
    rng = random.Random(number)
    lines = (rng.choices(WORDS, k=rng.randint(8, 30)) for _ in range(num_sentences))
    return "".join(f"{OPENINGS[number]} {' '.join(words)}.\n" for words in lines)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """train/ and eval/ of long and short documents, with a tokenizer's file; not to be changed."""
    directory = tmp_path_factory.mktemp("long")
    words = [*SPECIAL, ".", *WORDS, *OPENINGS]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    documents = [document(number, 3 if number % 4 == 3 else 440) for number in range(DOCUMENTS)]
    limits = {"max_seq_length": LONGEST, "max_predictions": MOST, "segments": "single"}
    for name, part, passes in (("train", documents[4:], 1), ("eval", documents[:4], 2)):
        text = directory / f"{name}.txt"
        text.write_text("\n".join(part))
        places = ([text], directory / "tokenizer.json", directory / "pair" / name)
        prepare_small(*places, **limits, dupe_factor=passes, with_baseline=name == "eval")
    return directory / "pair"


@pytest.fixture
def config(tiny_config):
    return load_config(tiny_config, SETTINGS)


def reader_of(set_dir):
    return SampleReader(set_dir, Manifest.load(set_dir))


def read(reader, ids):
    return make_batch(reader.read(ids), ids, mlm_denominator=1.0, nsp_denominator=1.0)


def test_sentences_of_one_document_fill_a_sequence(pair):
    assert problems(pair, full=True) == ""
    openings = 6 + len(WORDS) + np.arange(DOCUMENTS)
    for name, passes in (("train", 1), ("eval", 2)):
        rests = Counter[int]()
        reader, index = reader_of(pair / name), LengthIndex.open(pair / name)
        for sample in range(reader.manifest.num_samples):
            batch = read(reader, np.array([sample]))
            (of_document,) = np.intersect1d(originals(batch), openings)  # of one alone
            rests[of_document] += index.lengths[sample] < LONGEST - 32  # a sentence would fit
        assert max(rests.values()) == passes
        table = masked_count_table(LONGEST, MOST, 0.15)
        assert np.array_equal(index.masked_counts, table[index.lengths])
        assert index.manifest.format_version == 3 and index.masked_counts.dtype == np.uint16
        assert LONGEST - 32 < index.lengths.max() <= LONGEST and index.masked_counts.max() > 1220
        assert index.lengths.min() < 100  # a short document stays a short sequence


def test_dynamic_masks_are_planned_and_drawn(pair, config):
    set_dir, index = pair / "train", open_index(pair / "train", config)
    reader = reader_of(set_dir)
    planner = make_planner(config, index, seed=1)
    table = masked_count_table(LONGEST, MOST, RATE)
    assert table[-1] == MOST
    masks = DynamicMasks(set_dir, reader.manifest, rate=RATE, max_predictions=MOST, seed=5)
    source = DirectSource(reader, 0, masks)
    for plan in (planner.plan(1), planner.plan(2)):
        ids = plan.ids_of(0, 0)
        wanted = table[index.lengths[ids]].tolist()
        assert plan.num_masked.item() == sum(wanted) > 255
        (batch,) = source.micro_batches(plan)
        assert batch.masked_counts == tuple(wanted)
        assert torch.equal(originals(batch), originals(read(reader, ids)))


def test_a_run_trains_and_evaluates(pair, tiny_config, tmp_path):
    assert run_train(tiny_config, pair, tmp_path / "run", *SETTINGS) == 0
    guess = np.log(6 + len(WORDS) + DOCUMENTS)
    assert metrics_losses(tmp_path / "run") == pytest.approx([guess, guess], rel=0.02)


def test_published_lengths_are_planned_with_the_rate(config):
    half = replace(config, data=replace(config.data, masking="static", masking_rate=0.15))
    masked, fewer = (run_shapes(each)[-1].masked for each in (config, half))
    assert masked == pytest.approx(2 * fewer, rel=0.01)


def test_a_count_above_the_most_is_one_line(pair, tmp_path, config):
    spoiled = Path(shutil.copytree(pair, tmp_path / "pair"))
    path = spoiled / "train" / "index" / "masked_counts.u16"
    path.write_bytes(b"\x9b\x09" + path.read_bytes()[2:])  # 2,459
    sign(spoiled / "train")
    problem = "masked_counts.u16: contains numbers outside 1 .. 2458"
    with pytest.raises(DataError, match=problem):
        open_data(config, spoiled, checks_files=True)
    assert problem in problems(spoiled / "train", full=True)
