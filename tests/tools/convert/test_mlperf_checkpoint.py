"""MLPerf's own checkpoints are known by their tables; nobody else's are."""

import hashlib
from pathlib import Path

import pytest

from bert_tools.convert import tensorflow_source
from bert_tools.convert.tensorflow_source import PUBLISHED, mlperf_folder
from mlperf_bert.common.errors import CheckpointError
from tensorflow_cases import OBJECTS, V2


def test_others_of_the_same_name_are_not_taken_for_it() -> None:
    assert V2.name == "model.ckpt-28252"
    assert [mlperf_folder(source) for source in (V2, OBJECTS)] == [None, None]


def test_a_table_of_the_published_digest_is_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = V2.with_name(f"{V2.name}.index").read_bytes()
    known = {(len(table), hashlib.md5(table).hexdigest()): "tf1_ckpt"}
    monkeypatch.setattr(tensorflow_source, "PUBLISHED", known)
    assert mlperf_folder(V2) == "tf1_ckpt"
    assert mlperf_folder(OBJECTS) is None


def test_digests_have_the_form_of_such() -> None:
    for size, digest in PUBLISHED:
        assert size > 1000
        assert len(digest) == 32 and int(digest, 16)
    assert set(PUBLISHED.values()) == {"tf1_ckpt", "tf2_ckpt"}


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.index").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        mlperf_folder(tmp_path / "model")
