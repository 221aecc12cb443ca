"""What was given is read, or named with its reason; what cannot be learned from says why."""

import bz2
import gzip
import json
import lzma
import os

import pytest

from bert_tools.pretrain.files import find_files, opened, unread_in_words
from mlperf_bert.__main__ import main
from mlperf_bert.errors import DataError
from own_texts import made_up_texts
from support import refusal

TEXTS = made_up_texts()
LINES = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()


def prepare(corpus, out, *words):
    sizes = ("--max-seq-length", 48, "--max-predictions", 8, "--vocab-size", 300, "--workers", 1)
    return ("prepare", "--corpus", corpus, "--out", out, "--dupe-factor", 1, *sizes, *words)


def run(capsys, *words):
    capsys.readouterr()
    assert main([str(word) for word in prepare(*words)]) == 0
    return capsys.readouterr().out


def names(directory, **how):
    return [file.name for file in find_files(directory, **how)[0]]


def why(directory, **how):
    return {each.name: each.why for each in find_files(directory, **how)[1]}


def write(directory, contents):
    for name, held in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(held if isinstance(held, bytes) else held.encode())


def test_text_has_many_names_and_packings(tmp_path):
    text = "A text.\n" * 50
    write(
        tmp_path,
        {
            **dict.fromkeys(("a.rst", "b.tex", "c.markdown", "d.adoc", "e.org", "f.TXT"), text),
            "g.txt.bz2": bz2.compress(text.encode()),
            "h.json.gz": gzip.compress(LINES),
            "i.jsonl.xz": lzma.compress(LINES),
            "j.json": LINES,
        },
    )
    found, unread = find_files(tmp_path)
    assert len(found) == 10 and unread == []
    unpacked = {}
    for file in found:
        with opened(file) as stream:
            unpacked[file.name] = stream.read()
    assert unpacked["g.txt.bz2"] == unpacked["a.rst"] == text.encode()
    assert unpacked["h.json.gz"] == unpacked["i.jsonl.xz"] == LINES


def test_zstandard_is_read_by_pyarrow(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    frame = pa.compress(LINES, codec="zstd", asbytes=True)
    write(tmp_path, {"a.jsonl.zst": frame + frame})
    (file,), _ = find_files(tmp_path)
    with opened(file) as stream:
        assert stream.read() == LINES + LINES
    write(tmp_path, {"a.jsonl.zst": frame[:-9]})
    (file,), _ = find_files(tmp_path)
    with pytest.raises(DataError, match="cannot be read"), opened(file) as stream:
        stream.read()


def test_every_other_file_is_named_with_its_reason(tmp_path):
    write(
        tmp_path,
        {
            "text.txt": "A text of some length. " * 40,
            "page.html": "<p>x</p>",
            "part.csv.gz": b"x",
            "NOTES": "x",
            "array.json": '[{"text": "x"}]',
            "config.json": '{"hidden": 1}',
            "pretty.json": '{\n  "text": "x"\n}',
            ".hidden": "x",
        },
    )
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "lost.txt").symlink_to("nowhere")
    (tmp_path / "again").symlink_to(tmp_path)
    assert names(tmp_path) == ["text.txt"]
    no_lines = ".json without 'text' in its first line"
    assert why(tmp_path) == {
        "NOTES": "without an ending",
        "again": "already read by another name",
        "array.json": no_lines,
        "config.json": no_lines,
        "lost.txt": "with a broken link",
        "page.html": ".html",
        "part.csv.gz": ".csv.gz",
        "pipe.txt": "not a regular file",
        "pretty.json": no_lines,
    }
    others = (".html", ".", ".json")
    assert why(tmp_path, also=others).keys() == {"again", "lost.txt", "part.csv.gz", "pipe.txt"}
    write(tmp_path, {"config.json": '{"body": "x"}'})
    assert "config.json" not in why(tmp_path, text_field="body")


def test_entries_that_cannot_be_looked_at_are_named(tmp_path):
    write(tmp_path, {"a.txt": "a"})
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    (tmp_path / "out").mkdir()
    (tmp_path / "more").symlink_to("out")
    write(tmp_path, {"out/text/b.txt": "what an earlier call has made"})
    assert why(tmp_path) == {
        "circle.txt": "unreadable (too many levels of symbolic links)",
        "out": "already read by another name",
    }
    assert names(tmp_path) == ["a.txt", "more/text/b.txt"]
    assert names(tmp_path, out=tmp_path / "out") == ["a.txt"]


def test_a_line_of_json_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_tools.pretrain.files.MAX_LINE_BYTES", 2**17)
    line = json.dumps({"text": "x " * 2**17})
    write(tmp_path, {"a.json": line + "\n" + line, "b.json": LINES, "c.txt": "c" * 2**20})
    assert names(tmp_path) == ["b.json", "c.txt"]


def test_many_kinds_are_counted_together(tmp_path):
    write(tmp_path, {f"mail.{number:05d}": "x" for number in range(40)})
    write(tmp_path, {"a.txt": "x" * 99})
    said = unread_in_words(find_files(tmp_path)[1])
    assert said.endswith(", 34 of 34 other kinds (first 'mail.00000')") and len(said) < 200


def test_linked_folders_are_read_once(tmp_path):
    write(tmp_path, {"elsewhere/deep/a.txt": "a", "text/b.txt": "b"})
    (tmp_path / "text" / "link").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "deep" / "up").symlink_to("..")
    assert names(tmp_path / "text") == ["b.txt", "link/deep/a.txt"]
    assert why(tmp_path / "text") == {"link/deep/up": "already read by another name"}


@pytest.mark.parametrize(
    "contents",
    [
        {"README.md": "x" * 40, "data/a.csv": "x" * 400, "data/b.csv": "x" * 400},
        {"README.md": "x" * 40, "train.tar.zst": b"x" * 400},
        {"README.md": "x" * 40, "all.json": "[" + "1," * 300 + "1]"},
    ],
)
def test_a_readme_beside_the_data_is_not_the_data(capsys, tmp_path, contents):
    write(tmp_path / "text", contents)
    said = refusal(capsys, *prepare(tmp_path / "text", tmp_path / "out"))
    assert "contains more bytes in skipped files than in text files: " in said and "--also" in said
    assert not (tmp_path / "out").exists()


def test_pictures_beside_the_text_are_no_loss(tmp_path):
    write(tmp_path, {"a.md": "x" * 40, "b.png": b"x" * 999, "c.mp4": b"x" * 999})
    assert names(tmp_path) == ["a.md"] and len(why(tmp_path)) == 2


def test_what_is_not_read_is_said(capsys, tmp_path):
    write(
        tmp_path / "text", {"a.txt": "\n\n".join(TEXTS), "b.html": "x", "c.html": "x", "d.py": "x"}
    )
    said = run(capsys, tmp_path / "text", tmp_path / "out")
    assert "not read: 2 .html, 1 .py (first 'b.html')\n" in said
    said = run(capsys, tmp_path / "text", tmp_path / "also", "--also", ".PY")
    assert "in 2 files" in said and "not read: 2 .html (first 'b.html')\n" in said
    with pytest.raises(SystemExit):
        run(capsys, tmp_path / "text", tmp_path / "no", "--also", "py")
    assert "'py' is not an ending of file names" in capsys.readouterr().err


BOOK = " ".join(TEXTS)
FAULTS = {  # text, options, what is said, and what would help
    "a book in one line": (BOOK, (), "has 1 document of ", "by empty lines"),
    "a book in lines": (BOOK.replace(". ", ".\n"), (), "has 1 document of ", "by empty lines"),
    "a long book": (BOOK.replace(". ", ".\n") * 8, (), "has 1 document of ", "by empty lines"),
    "documents of one sentence": (
        "\n\n".join(text.partition(". ")[0] + "." for text in TEXTS),
        (),
        "138 of 138 documents have a single sentence",
        "--segments single",
    ),
    "copies only": (
        "\n\n".join([TEXTS[0], TEXTS[1]] * 40),
        (),
        "only 2 of them differ",
        "that differ",
    ),
    "an empty file": ("", (), "has 0 documents after", "sentences"),
    "figures only": (
        "\n\n".join(["12 34 56 " * 20] * 40),
        (),
        "has 0 documents after",
        "sentences",
    ),
    "another encoding": (
        "\n\n".join("größer über Flüsse" * 3 for _ in range(50)).encode("latin-1"),
        (),
        "1 of 1 files are not Unicode text (the first is 'text.txt')",
        "iconv",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_text_that_cannot_be_learned_from_says_why(capsys, tmp_path, fault):
    contents, words, problem, remedy = FAULTS[fault]
    write(tmp_path, {"text.txt": contents})
    said = refusal(capsys, *prepare(tmp_path / "text.txt", tmp_path / "out", *words))
    assert problem in said and remedy in said.partition("; ")[2]


def test_one_sentence_is_enough_for_masked_words_alone(capsys, tmp_path):
    write(tmp_path, {"text.txt": FAULTS["documents of one sentence"][0]})
    said = run(capsys, tmp_path / "text.txt", tmp_path / "out", "--segments", "single")
    assert " train, " in said


def test_other_encodings_of_unicode_are_read_and_said(capsys, tmp_path):
    texts = "\n\n".join(TEXTS)
    write(tmp_path, {"utf8/a.txt": texts, "utf16/a.txt": texts.encode("utf-16")})
    run(capsys, tmp_path / "utf8", tmp_path / "out8")
    said = run(capsys, tmp_path / "utf16", tmp_path / "out16")
    assert "encodings of the files: 1 in UTF-16-LE, and all others in UTF-8\n" in said
    held = [(tmp_path / out / "text" / "eval.txt").read_bytes() for out in ("out8", "out16")]
    assert held[0] == held[1]
