"""The published length counts, and draws that follow them."""

from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.length_histogram import LengthHistogram, read_histogram, wikipedia_lengths

THREE = LengthHistogram(lengths=np.array([5, 9, 20]), counts=np.array([1, 2, 7]))


def test_published_facts() -> None:
    # arXiv 2107.02027: 16,279,552 sequences of at most 512 tokens, half of that on average.
    published = wikipedia_lengths()
    assert published.num_sequences == 16_279_552
    assert published.max_length == 512
    assert round(published.mean_length, 2) == 255.83
    assert (np.diff(published.lengths) > 0).all()
    assert (published.counts > 0).all()


def test_mean_and_maximum() -> None:
    assert THREE.num_sequences == 10
    assert THREE.max_length == 20
    assert THREE.mean_length == (5 + 2 * 9 + 7 * 20) / 10


def test_even_draws_take_every_range_once() -> None:
    assert (
        sorted(THREE.draw_evenly(THREE.num_sequences, seed=4))
        == np.repeat(THREE.lengths, THREE.counts).tolist()
    )


def test_a_seed_is_one_sequence_of_draws() -> None:
    draw = wikipedia_lengths().draw_evenly
    np.testing.assert_array_equal(draw(100, seed=7), draw(100, seed=7))
    assert (draw(100, seed=7) != draw(100, seed=8)).any()


def test_a_file_is_read_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("# ours\nlength,count\n\n20,7\n 5,1 \n9,2\n# none of these:\n8,0\n")
    read = read_histogram(path)
    np.testing.assert_array_equal(read.lengths, THREE.lengths)
    np.testing.assert_array_equal(read.counts, THREE.counts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "counts no sequence"),
        ("length,count\n", "counts no sequence"),
        ("length,count\n5,0\n", "counts no sequence"),
        ("5,1\n", "lengths.csv:1: is '5,1' where 'length,count' belongs"),
        ("count,length\n5,1\n", "lengths.csv:1: is 'count,length'"),
        ("length,count\n5,1\n5,2\n", "lengths.csv:3: length 5 for the second time"),
        ("length,count\n5\n", "lengths.csv:2: '5' is not two whole numbers"),
        ("length,count\n5,1,1\n", "lengths.csv:2: '5,1,1' is not two whole numbers"),
        ("length,count\n5,-1\n", "lengths.csv:2: '5,-1' is not two whole numbers"),
        ("length,count\n5,1.5\n", "lengths.csv:2: '5,1.5' is not two whole numbers"),
        ("length,count\n5,\n", "lengths.csv:2: '5,' is not two whole numbers"),
        ("length,count\nnan,1\n", "lengths.csv:2: 'nan,1' is not two whole numbers"),
        ("length,count\n\u0665,1\n", "is not two whole numbers"),
        ("length,count\n0,3\n", "lengths.csv:2: length 0"),
        ("length,count\n65536,3\n", "lengths.csv:2: length 65536"),
        (f"length,count\n5,{'9' * 5000}\n", "lengths.csv:2: has a number above"),
    ],
)
def test_what_is_no_histogram_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_histogram(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name, message in (("binary.csv", "is not UTF-8 text"), ("missing.csv", "No such file")):
        with pytest.raises(DataError, match=message):
            read_histogram(tmp_path / name)
