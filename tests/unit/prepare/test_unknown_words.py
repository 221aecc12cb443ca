"""A vocabulary that does not fit its text is seen while preparing."""

import pytest

from mlperf_bert.data.index import ShardSettings
from mlperf_bert.errors import DataError
from mlperf_bert.prepare.build import prepare_text
from verify_cases import SPECIAL


def prepared(tmp_path, unknown, of=100):
    """Two documents of `of` words, of which so many are not in the vocabulary."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "river", "stone"]) + "\n")
    line = " ".join(["река"] * unknown + ["river"] * (of - unknown))
    (tmp_path / "text.txt").write_text(f"{line}\n{line}\n\n{line}\n{line}\n")
    settings = ShardSettings(max_seq_length=32, max_predictions=5, dupe_factor=1, seed=1)
    places = [tmp_path / "text.txt"], tmp_path / "vocab.txt", tmp_path / "out"
    return prepare_text(*places, settings, workers=1)


def test_most_words_unknown_is_an_error(tmp_path):
    """Also when typed again, where the shard is there already."""
    for _ in range(2):
        with pytest.raises(DataError, match=r"out: \d+.\d% of the tokens are \[UNK\]; use a voc"):
            prepared(tmp_path, 80)
        assert not (tmp_path / "out" / "index").exists()


@pytest.mark.parametrize(
    ("unknown", "said"), [(2, "warning: 2.0% of the tokens are [UNK]; use a vocabulary"), (1, "")]
)
def test_many_unknown_words_are_a_warning_and_few_are_no_matter(tmp_path, capsys, unknown, said):
    prepared(tmp_path, unknown)
    printed = capsys.readouterr().out
    assert said in printed and ("[UNK]" in printed) == bool(said)
