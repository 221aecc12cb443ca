"""The three formats give the same examples, and each mistake in a file is one line."""

import csv
import json
from collections import Counter

import pytest

from bert_tools.score.data import read_labelled, read_pairs
from mlperf_bert.errors import DataError

ROWS = [{"text": f'text {n}, "quoted"\nand é', "label": "ab"[n % 2]} for n in range(8)]


def written(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.csv", "A.CSV", "a.parquet"])
def test_each_format_gives_the_same_examples(tmp_path, name):
    path = tmp_path / name
    if name == "A.CSV":
        written(tmp_path / "b.csv", ROWS).rename(path)
    else:
        written(path, ROWS)
    found = read_labelled(path)
    assert (found.firsts, found.seconds) == ([row["text"] for row in ROWS], None)
    assert found.values == [row["label"] for row in ROWS] and len(found) == 8


def test_pairs_are_read(tmp_path):
    rows = [{"text": f"a{n}", "text_pair": f"b{n}", "label": n % 2} for n in range(8)]
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        found = read_labelled(written(tmp_path / name, rows))
        assert found.seconds == [row["text_pair"] for row in rows]
        assert Counter(found.values) == {"0": 4, "1": 4}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_an_empty_column_of_second_texts_means_single_texts(tmp_path, name):
    path = written(tmp_path / name, [{**row, "text_pair": None} for row in ROWS])
    assert read_labelled(path).seconds is None
    for found, said in (((None, "x"), "has a second text"), (("x", None), "has no second text")):
        rows = [{**ROWS[n % 2], "text_pair": found[n > 3]} for n in range(8)]
        with pytest.raises(DataError, match=r": (line|row) \d+: " + said) as error:
            read_labelled(written(tmp_path / name, rows))
        if name != "a.csv":  # whose texts have several lines
            assert {"a.jsonl": "line 9:", "a.parquet": "row 5:"}[name] in str(error.value)
    later = written(tmp_path / "b.jsonl", [*ROWS, {**ROWS[0], "text_pair": "x"}])
    with pytest.raises(DataError, match=r"line 17: has a second text.*fill in 'text_pair' in all"):
        read_labelled(later)


def test_a_long_text_of_csv_is_read(tmp_path):
    rows = [{**row, "text": "word " * 30_000} for row in ROWS]
    assert len(read_labelled(written(tmp_path / "a.csv", rows)).firsts[0]) == 150_000


def test_numbers_of_pairs_are_read(tmp_path):
    rows = [{"text": "a", "text_pair": "b", "score": n / 2} for n in range(10)]
    texts, numbers = read_pairs(written(tmp_path / "p.csv", rows))
    assert numbers == [n / 2 for n in range(10)] and texts.seconds == ["b"] * 10


GOOD = [json.dumps({"text": f"t{n}", "label": "ab"[n % 2]}) for n in range(8)]
WRONG = {  # name of the file, its contents, and what is said of it
    "not JSON": ("a.jsonl", [*GOOD, "{'a': 1}"], r"line 9: is not JSON \(.*one JSON object per"),
    "no object": ("a.jsonl", ["[1]"], "line 1: is not a JSON object"),
    "no field": (
        "a.jsonl",
        [*GOOD, '{"txt": "x"}'],
        "line 9: has no field 'text', only 'txt'; rename the field to 'text'",
    ),
    "no label": (
        "a.jsonl",
        [*GOOD, '{"text": "x"}'],
        "no field 'label'.*; rename the field to 'label'",
    ),
    "empty text": (
        "a.jsonl",
        [*GOOD, '{"text": " ", "label": "a"}'],
        "line 9: the field 'text' is empty; remove this example",
    ),
    "null text": ("a.jsonl", ['{"text": null, "label": "a"}'], "line 1: the field 'text' is empty"),
    "a number": ("a.jsonl", ['{"text": 5, "label": "a"}'], "'text' is 5, not a text; write a text"),
    "NaN text": ("a.jsonl", ['{"text": NaN, "label": "a"}'], "line 1: the field 'text' is empty"),
    "NaN label": ("a.jsonl", ['{"text": "x", "label": NaN}'], "line 1: the field 'label' is nan"),
    "null label": ("a.jsonl", ['{"text": "x", "label": null}'], "the field 'label' is None"),
    "surrogate": (
        "a.jsonl",
        [*GOOD, '{"text": "a \\ud800 b", "label": "a"}'],
        r"line 9: the field 'text' contains half of a character, such as \\ud800; write both",
    ),
    "a list": ("a.jsonl", ['{"text": "x", "label": [1]}'], "the field 'label' is a list"),
    "UTF-8": ("a.jsonl", [*GOOD, b"\xff"], "line 9: is not UTF-8; save the file as UTF-8"),
    "one class": ("a.jsonl", GOOD[::2], "a.jsonl: has only the class 'a'; add examples"),
    "small class": ("a.jsonl", GOOD[:7], "the class 'b' has 3 of the 4 examples needed; add"),
    "empty file": ("a.jsonl", [], "a.jsonl: has no examples"),
    "no header": ("a.csv", ["text,lab", "x,a"], "line 2: has no field 'label', only 'text', 'lab'"),
    "short row": ("a.csv", ["text,label", "x"], "line 2: does not have the 2 fields of the header"),
    "long row": ("a.csv", ["text,label", "x,y,z"], "line 2: does not have the 2 fields.*; quote"),
    "no quote": ("a.csv", ["text,label", '"x'], r"a.csv: line \d: .*; write the file with a CSV"),
    "empty label": ("a.csv", ["text,label", "x,"], "line 2: the field 'label' is ''"),
    "no Parquet": ("a.parquet", GOOD, "a.parquet: is not a whole Parquet file"),
    "ending": ("a.xlsx", GOOD, "has the unknown ending '.xlsx'; write it as JSON lines"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_with_its_place(tmp_path, name):
    file, lines, said = WRONG[name]
    path = tmp_path / file
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    with pytest.raises(DataError, match=said) as error:
        read_labelled(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"lost.csv: No such file.*; check the file's name"):
        read_labelled(tmp_path / "lost.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="is not a regular file"):
        read_labelled(tmp_path / "folder.csv")


def test_numbers_that_rank_nothing_are_refused(tmp_path):
    row = {"text": "a", "text_pair": "b", "score": 1}
    for rows, said in (
        ([row] * 12, "has 12 pairs with 1 different numbers; pass at least 10 pairs and two"),
        ([row, {**row, "score": 2}], "has 2 pairs"),
        ([row, {**row, "score": "high"}], "line 3: the field 'score' is 'high'; write a finite"),
        ([{**row, "score": "inf"}], "write a finite number"),
        ([{"text": "a", "score": 1}], "has no field 'text_pair', only 'text', 'score'; rename"),
    ):
        with pytest.raises(DataError, match=said):
            read_pairs(written(tmp_path / ("p.csv" if len(rows) < 3 else "p.jsonl"), rows))
