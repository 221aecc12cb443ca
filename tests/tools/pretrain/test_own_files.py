"""A user's files: which are read, and where documents end."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.pretrain import documents as own_documents
from bert_tools.pretrain.documents import Rules, Section, next_document, sections
from bert_tools.pretrain.files import TextFile, find_files, opened
from bert_tools.pretrain.prepare import HELD_OUT_BYTES, default_share
from mlperf_bert.errors import DataError
from own_texts import write_parquet

TEXT = "One sentence. Another one.\n\nA second document.\n"
OF_TEXT = Rules("file", "text")


def read(path):
    with opened(find_files(path)[0][0]) as stream:
        return stream.read()


def whole(path, form="text"):
    return TextFile(path, path.name, form, "plain", path.stat().st_size)


def test_a_directory_is_read_by_name_at_any_depth(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/B.TXT.gz", ".git/x.txt", "d.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, unread = find_files(tmp_path)
    found = [(file.name, file.form, file.packing) for file in files]
    packed = ("a/B.TXT.gz", "text", "gzip")
    assert found == [packed, ("a/z.jsonl", "json_lines", "plain"), ("b.txt", "text", "plain")]
    assert [(each.name, each.why) for each in unread] == [("d.gz", ".gz")]
    assert find_files(tmp_path / "b.txt")[1] == []


def test_a_file_that_is_named_is_text_whatever_it_is_called(tmp_path):
    with pytest.raises(DataError, match="contains no text files; pass files with these endings: "):
        find_files(tmp_path)
    path = tmp_path / "corpus.dump"
    with pytest.raises(DataError, match="No such file"):
        find_files(path)
    path.write_text(TEXT)
    assert find_files(path)[0][0].form == "text"
    assert read(path) == TEXT.encode()


def refusal(read, *given):
    """The one line of an error."""
    with pytest.raises(DataError) as caught:
        read(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_packed_files(tmp_path):
    path, contents = tmp_path / "a.txt.gz", TEXT.encode() * 5000
    path.write_bytes(gzip.compress(contents) + gzip.compress(b"more"))
    assert read(path) == contents + b"more"
    packed = gzip.compress(bytes(range(256)) * 4000)
    for damaged in (b"no packed file at all", packed[:-1], packed[:-20], packed + b"more"):
        path.write_bytes(damaged)
        assert "a.txt.gz: cannot be read" in refusal(read, path)


def documents(path, rule, form="text"):
    """The documents, sections of one together, white space made single."""
    found = []
    for section in sections(whole(path, form), Rules(rule, "text")):
        if section.opens:
            found.append([])
        found[-1] += [" ".join(paragraph.split()) for paragraph in section.paragraphs]
    return found


def test_documents_of_text_and_of_lines_of_json(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("First line,\nwrapped.\n\n \t\nSecond.\nMore.\n\n\nThird.")
    expected = ["First line, wrapped.", "Second. More.", "Third."]
    assert documents(path, "empty-line") == [[each] for each in expected]
    assert documents(path, "file") == [expected]
    texts = ["One.\nTwo.", "", "Three \ud83d\ude00 \ud800."]
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n")
    found = documents(path, "file", "json_lines")
    assert found == [["One.", "Two."], ["Three \U0001f600 \ud800."]]
    path.write_text('{"body": "words"}')
    (section,) = sections(whole(path, "json_lines"), Rules("file", "body"))
    assert section == Section(["words"], opens=True)
    for garbage in (b"\x00\xff", b'["a list"]', b'{"title": "no text"}', b"[" * 100_000):
        path.write_bytes(garbage)
        assert str(path) in refusal(documents, path, "empty-line", "json_lines")


def test_an_error_names_the_line_of_the_whole_file(tmp_path):
    path = tmp_path / "a.jsonl"
    before = '{"text": "One."}\n\r\n' * 5
    for line, problem in (
        ("{", "is not JSON; write one"),
        ("[1, 2]", "is not a JSON object; write one"),
        ('{"body": "x"}', "has no field 'text'; pass the field"),
        ('{"text": null}', "has null instead of text in the field 'text'; write text"),
        ('{"text": 5}', "has 5 instead of text in the field 'text'; write text"),
    ):
        path.write_text(before + line)
        start = next_document(whole(path, "json_lines"), len(before) // 2)
        for piece in (whole(path, "json_lines"), replace(whole(path, "json_lines"), start=start)):
            assert f"{path}: line 11: {problem}" in refusal(list, sections(piece, OF_TEXT))


@pytest.mark.parametrize("rule", ["empty-line", "file"])
def test_overlong_documents_are_cut_and_nothing_is_lost(tmp_path, rule, monkeypatch):
    monkeypatch.setattr(own_documents, "SECTION_CHARS", 100)
    words = [f"wörd{number}" for number in range(200)]
    path = tmp_path / "a.txt"
    path.write_text(" ".join(words) + "\n\nanother", encoding="utf-8")
    found = list(sections(whole(path), Rules(rule, "text")))
    text = "".join(paragraph for section in found for paragraph in section.paragraphs)
    assert text.split() == [*words, "another"]
    assert max(sum(map(len, section.paragraphs)) for section in found) <= 200
    assert sum(section.opens for section in found) == (1 if rule == "file" else 2)


def test_bytes_that_are_no_utf8_are_replaced_across_cuts(tmp_path, monkeypatch):
    monkeypatch.setattr(own_documents, "SECTION_CHARS", 5)
    path = tmp_path / "a.txt"
    path.write_bytes("ääää".encode() + b"\xff" + "ä".encode())
    found = sections(whole(path), Rules("file", "text"))
    assert "".join(text for section in found for text in section.paragraphs) == "ääää\ufffdä"


PIECES = ["word ", "\n", "\n\n", " \n", "x", "\n \n", "ä"]


@given(text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=120), step=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_cut_anywhere_a_file_has_the_same_documents(tmp_path_factory, text, step):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_text("".join(text), encoding="utf-8")
    starts = [0]
    for position in range(1, path.stat().st_size, step):
        start = next_document(whole(path), position)
        if start is not None and start > starts[-1]:
            starts.append(start)
    cut = []
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        piece = replace(whole(path), start=start, stop=stop)
        found = list(sections(piece, Rules("empty-line", "text")))
        assert not start or found[0].opens
        cut += [[" ".join(each.split()) for each in section.paragraphs] for section in found]
    uncut = documents(path, "empty-line")
    assert cut == uncut
    assert len(starts) > 1 or len(uncut) < 20


def of_parquet(path, text_field="text"):
    (file,), _ = find_files(path)
    return [section.paragraphs for section in sections(file, Rules("empty-line", text_field))]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "category"])
def test_a_row_of_parquet_is_a_document_whatever_row_group_it_is_in(tmp_path, kind):
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    texts = ["One.\nTwo.", "", "Drei \U0001f600.", None, *(f"Text {n}." for n in range(60))]
    column = pa.array(texts, "string" if kind in ("binary", "category") else kind)
    if kind == "category":  # of pandas
        column = column.dictionary_encode()
    elif kind == "binary":  # of Spark, Hive, Impala
        column = column.cast("binary")
    path = write_parquet(tmp_path / "a.PARQUET", column, row_group_size=7)
    assert of_parquet(path) == [text.split("\n") for text in texts if text]


def test_parquet_that_gives_no_text_is_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    for text, field, problem in (
        (["a"], "body", "row 1: has no field 'body'"),
        ([["a"]], "text", "row 1: has a list instead of text in the field 'text'"),
    ):
        said = refusal(of_parquet, write_parquet(path, text), field)
        assert problem in said and "--text-field" in said
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    write_parquet(path, ["some text"], write_page_checksum=True, **plain)
    contents = path.read_bytes()
    flipped = contents.replace(b"some text", b"some\xfftext", 1)
    for damaged in (contents[:-9], b"PARE" + contents[4:-4] + b"PARE", flipped):
        path.write_bytes(damaged)
        assert "a.parquet: cannot be read" in refusal(of_parquet, path)


def test_the_share_halves_as_text_grows(tmp_path):
    sizes = [2**exponent for exponent in range(10, 45)]
    files = (TextFile(tmp_path, "a", "text", "plain", size) for size in sizes)
    found = [default_share([file]) for file in files]
    assert found[0] == 1 / 16
    assert all(later in (earlier, earlier / 2) for earlier, later in pairwise(found))
    assert all(s * size <= HELD_OUT_BYTES for s, size in zip(found, sizes, strict=True))
