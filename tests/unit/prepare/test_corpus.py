"""The embedded corpus: enough prose, nothing held out that was trained on, made once."""

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.data.index import LengthIndex, ShardSettings
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import DataError
from mlperf_bert.prepare import corpus
from mlperf_bert.prepare.corpus import (
    collect_documents,
    prepare_embedded,
    prose_sentences,
    split_held_out,
)
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from support import contents

SETTINGS = ShardSettings(max_seq_length=64, max_predictions=10, dupe_factor=1, seed=12345)


def documents_in(path):
    parts = path.read_text(encoding="utf-8").strip("\n").split("\n\n")
    return [part.split("\n") for part in parts]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The sets of a sixth of the library's files, which take seconds to read."""
    out_dir = tmp_path_factory.mktemp("embedded")
    files = corpus._source_files
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus, "_source_files", lambda root: files(root)[::6])
        documents = collect_documents()
        assert len(documents) > 600
        patched.setattr(corpus, "collect_documents", lambda: documents)
        assert prepare_embedded(out_dir, 2048, SETTINGS)
        yield out_dir


def test_both_sets_are_complete_and_nothing_held_out_occurs_in_training(embedded):
    texts = [doc for path in embedded.glob("text/train-*.txt") for doc in documents_in(path)]
    held_out = documents_in(embedded / "text" / "eval.txt")
    seen = {sentence for document in texts for sentence in document}
    assert not seen & {sentence for document in held_out for sentence in document}
    assert 0.07 < len(held_out) / (len(texts) + len(held_out)) < 0.12
    train, evaluation = LengthIndex.open(embedded / "train"), LengthIndex.open(embedded / "eval")
    manifest = evaluation.manifest
    assert train.manifest.vocabulary_sha256 == manifest.vocabulary_sha256
    assert len(load_vocabulary(embedded / "train" / "vocab.txt")) == 2048
    assert train.manifest.corpus == manifest.corpus and train.manifest.num_samples > 650
    assert manifest.baseline.masked_tokens >= 1650
    assert 0.02 < manifest.baseline.mask_only_accuracy < manifest.baseline.context_free_accuracy
    assert manifest.baseline.context_free_accuracy < 0.25
    samples = SampleReader(embedded / "eval", manifest).read(np.arange(manifest.num_samples))
    assert (samples.input_ids == manifest.unk_id).mean() < 0.01


def test_a_second_call_reads_two_indexes(embedded, tmp_path):
    for name in ("train", "eval"):
        shutil.copytree(embedded / name / "index", tmp_path / name / "index")
    for index in tmp_path.glob("*/index/*.u*"):
        index.unlink()
    assert not prepare_embedded(tmp_path, 2048, SETTINGS)
    with pytest.raises(DataError, match="max_seq_length = 64 instead of 128"):
        prepare_embedded(embedded, 2048, replace(SETTINGS, max_seq_length=128))


def test_a_rerun_finishes_an_interrupted_one(embedded, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(embedded, copy)
    shutil.rmtree(copy / "eval")
    (copy / "train" / "index" / "dataset.json").unlink()
    (copy / "train" / "shards" / "train-2.hdf5").unlink()
    assert prepare_embedded(copy, 2048, SETTINGS)
    assert contents(copy) == contents(embedded)


def test_held_out_documents_depend_on_no_others_but_for_what_they_share():
    documents = [("Shared by everybody.", f"Sentence {i} is here.") for i in range(300)]
    train, of_all = split_held_out(documents)
    _, of_half = split_held_out(documents[::2])
    assert set(of_half) == set(of_all) & {document[1:] for document in documents[::2]}
    assert 10 < len(of_all) < 60 and len(train) + len(of_all) == 300
    assert all("Shared by everybody." not in document for document in of_all)


def test_prose_is_kept_and_code_dropped():
    docstring = """Return the sum of two numbers.

    It works for floats as well.  Nothing else
    is supported by it.

    >>> add(1, 2)
    3 is what is printed here today

    * The first item of a list.
    * The second item of it.

    Table     Of     Things
    ========================
    """
    assert prose_sentences(docstring) == (
        "Return the sum of two numbers.",
        "It works for floats as well.",
        "Nothing else is supported by it.",
        "The first item of a list.",
        "The second item of it.",
    )


def test_docstrings_are_found_in_the_order_of_a_walk_over_the_tree():
    source = """
try:
    class Tried:
        def method(self): "doc 1"
except OSError:
    async def caught(): "doc 2"
else:
    def otherwise(): "doc 3"
finally:
    match 1:
        case 1:
            def matched(): "doc 4"
for _ in ():
    while 0:
        def inner():
            "doc 5"
            with x:
                def innermost(): "doc 6"
    else:
        def after(): "doc 7"
def last(): "doc 8"
"""
    tree = ast.parse(source)
    wanted = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.Module)]
    found = [node for node in corpus._statements(tree) if isinstance(node, ast.stmt | ast.Module)]
    assert found == wanted and sum(isinstance(node, ast.Constant) for node in ast.walk(tree)) > 8
    for path in corpus._source_files(Path(ast.__file__).parent)[::60]:
        tree = corpus._parsed(path) or ast.parse("")
        found = [node for node in corpus._statements(tree) if isinstance(node, ast.stmt)]
        assert found == [node for node in ast.walk(tree) if isinstance(node, ast.stmt)], path


def test_a_python_without_sources_is_a_clear_error(tmp_path):
    (tmp_path / "broken.py").write_text('"""Never closed.')
    with pytest.raises(DataError, match="has only 0 of the 500 documents"):
        collect_documents(tmp_path)
