"""A user's own text to two prepared sets: the same whatever the way, resumable, nothing leaked."""

import gzip
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bert_tools.pretrain import prepare as preparing
from bert_tools.pretrain.cleaning import documents_of
from bert_tools.pretrain.prepare import Cleaned, Part, fitting_share, prepare_corpus
from bert_tools.pretrain.vocabulary import with_frequent_characters
from mlperf_bert.data.index import Manifest
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare.documents import digest_of
from mlperf_bert.prepare.verify import verify
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from own_texts import (
    SETTINGS,
    contents,
    made_up_document,
    made_up_texts,
    make,
    own_text,
    write_parquet,
)
from verify_cases import flip


@pytest.fixture
def texts():
    return made_up_texts()


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """Several jobs of so small a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "MIN_PART_BYTES", 4000)
        patch.setattr(preparing, "LARGEST_SHARE", 0.2)
        yield


@pytest.fixture
def wanted(tmp_path, texts):
    """Small settings, and the texts in one file."""
    return own_text(tmp_path / "text.txt", texts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result for `wanted`; tests must not change it."""
    directory = tmp_path_factory.mktemp("whole")
    return make(own_text(directory / "text.txt", made_up_texts()), directory / "out")


def documents_in(out, stem):
    """The documents of one side, of the last cleaning if there were two."""
    cleanings = sorted((out / "text").glob("*/"), key=lambda path: path.stat().st_mtime_ns)
    paths = sorted([*(out / "text").glob(f"{stem}*.txt"), *cleanings[-1].glob(f"{stem}*.txt")])
    return [document for path in paths for document in documents_of(path)]


def test_two_sets_and_a_vocabulary(wanted, whole, texts):
    out = whole
    train, held_out = (Manifest.load(out / name) for name in ("train", "eval"))
    assert len(train.shards) > 1
    assert train.vocabulary_sha256 == held_out.vocabulary_sha256
    assert load_vocabulary(out / "vocab.txt").sha256 == train.vocabulary_sha256
    assert train.vocab_size == 300 and held_out.baseline is not None
    there = [documents_in(out, "train"), list(documents_of(out / "text" / "eval.txt"))]
    everything = {" ".join(text.split()) for text in texts}
    assert {" ".join(document.split()) for side in there for document in side} == everything
    assert 0.1 < len(there[1]) / len(texts) < 0.3
    assert all(digest_of(document) < 0.2 * 2**64 for document in there[1])
    assert all(digest_of(document) >= 0.2 * 2**64 for document in there[0])
    record = json.loads((out / "corpus.json").read_text())
    assert record["documents"]["train"] == len(there[0])
    assert record["documents"]["eval"] == len(there[1])
    assert not prepare_corpus(wanted, out, workers=1)  # it is there
    verify(out, full=True, workers=1, quiet=True).raise_if_wrong()


def test_workers_layout_and_packing_change_nothing(wanted, whole, tmp_path, texts):
    expected = contents(whole)
    assert contents(make(wanted, tmp_path / "two", workers=2)) == expected
    # The same name, so that it lies in the same place of the order of files.
    for name, form in (("j.jsonl", "file"), ("p.parquet", "file"), ("g.txt.gz", "empty-line")):
        directory = tmp_path / name.split(".")[0]
        directory.mkdir()
        if name.endswith("jsonl"):
            lines = (json.dumps({"text": text}) for text in texts)
            (directory / name).write_text("\n".join(lines))
        elif name.endswith("gz"):
            (directory / name).write_bytes(gzip.compress(wanted.source.read_bytes()))
        else:
            write_parquet(directory / name, texts, row_group_size=16)
        out = make(replace(wanted, source=directory, documents=form), tmp_path / f"out-{name}")
        assert sorted(documents_in(out, "train")) == sorted(documents_in(whole, "train"))
        eval_texts = [each / "text" / "eval.txt" for each in (out, whole)]
        assert eval_texts[0].read_bytes() == eval_texts[1].read_bytes()
        assert (out / "vocab.txt").read_bytes() == expected["vocab.txt"]


def test_stopped_anywhere_it_goes_on_to_the_same_bytes(wanted, whole, tmp_path, monkeypatch):
    """And what is cleaned is not cleaned again."""
    rename, read_sections = Path.replace, preparing.sections
    out, stops, allowed, cleaned = tmp_path / "stopped", 0, 1, []

    def watched(piece, rules):
        cleaned.append(piece.start)
        return read_sections(piece, rules)

    def replace_or_stop(self, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(preparing, "sections", watched)
    monkeypatch.setattr(Path, "replace", replace_or_stop)
    while True:
        left = allowed
        try:
            make(wanted, out)
            break
        except KeyboardInterrupt:
            stops, allowed = stops + 1, allowed + 2
    assert stops > 5
    assert 3 < len(set(cleaned)) <= len(cleaned) <= len(set(cleaned)) + stops
    assert contents(out) == contents(whole)


def test_added_documents_and_copies_move_none_across(wanted, whole, tmp_path, texts):
    rng = random.Random(9)
    more = [made_up_document(rng) for _ in range(60)]
    wanted.source.write_text("\n\n".join([*more[:30], *texts, *texts[:40], *more[30:]]))
    after = make(wanted, tmp_path / "after")
    for stem in ("train", "eval"):
        assert set(documents_in(whole, stem)) < set(documents_in(after, stem))
    held_out = documents_in(after, "eval")
    assert not set(held_out) & set(documents_in(after, "train"))
    assert len(set(held_out)) == len(held_out)  # a copy is not evaluated again
    record = json.loads((after / "corpus.json").read_text())
    assert record["documents"]["held out but not needed"] > 0
    written_again = documents_in(after, "once-train")
    assert written_again and len(set(written_again)) == len(written_again)
    assert record["documents"]["repeated sections left out of train"] > 0


def test_a_small_text_with_many_copies_has_both_sets(wanted, tmp_path, texts):
    wanted.source.write_text("\n\n".join(texts[:30] * 4))
    out = make(wanted, tmp_path / "out")
    counts = json.loads((out / "corpus.json").read_text())["documents"]
    trained_on = counts["train"] - counts["repeated sections left out of train"]
    assert 4 * trained_on == counts["train"] >= 80
    assert trained_on + counts["eval"] == 30 and counts["eval"] >= 2


@pytest.mark.parametrize("copy", [shutil.copy, os.symlink])
def test_a_copied_file_is_trained_on_once(wanted, whole, tmp_path, copy):
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        copy(wanted.source, tmp_path / "text" / name)
    twice = replace(wanted, source=tmp_path / "text", settings=replace(SETTINGS, segments="single"))
    out = make(twice, tmp_path / "out")
    verify(out, full=True, workers=1, quiet=True).raise_if_wrong()
    counts, once = (
        json.loads((each / "corpus.json").read_text())["documents"] for each in (out, whole)
    )
    assert counts == {
        "train": 2 * once["train"],
        "eval": once["eval"],
        "held out but not needed": once["eval"],
        "repeated sections left out of train": once["train"],
    }


def test_long_documents_stay_on_one_side(wanted, tmp_path, monkeypatch, texts):
    monkeypatch.setattr("bert_tools.pretrain.documents.SECTION_CHARS", 200)
    (tmp_path / "books").mkdir()
    books = [texts[first : first + 5] for first in range(0, 150, 5)]
    for number, book in enumerate(books):
        (tmp_path / "books" / f"{number}.txt").write_text("\n\n".join(book))
    out = make(replace(wanted, source=tmp_path / "books", documents="file"), tmp_path / "out")
    sides = [
        {" ".join(document.split()) for document in documents_in(out, stem)}
        for stem in ("train", "eval")
    ]
    assert all(sides)
    for book in books:
        words = {" ".join(text.split()) for text in book}
        assert not (words & sides[0] and words & sides[1])
    held_out = sum(any(section in " ".join(book) for section in sides[1]) for book in books)
    counts = json.loads((out / "corpus.json").read_text())["documents"]
    assert (counts["train"], counts["eval"]) == (len(books) - held_out, held_out)


def test_a_directory_of_something_else_is_refused(wanted, whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    before = contents(out)
    record = json.loads((out / "corpus.json").read_text())
    longer = replace(SETTINGS, max_seq_length=64)
    for change, problem in (
        ({"documents": "file"}, "was prepared with documents = empty-line, which is now file"),
        ({"vocab_size": 301}, "prepared with vocabulary = own, 300 tokens, which is now own, 301"),
        ({"settings": longer}, "was prepared with max_seq_length = 48, which is now 64"),
    ):
        # Finished, and as if it had been stopped before its end.
        for written in (record, {"settings": record["settings"]}):
            (out / "corpus.json").write_text(json.dumps(written))
            with pytest.raises(DataError, match=problem):
                make(replace(wanted, **change), out)
        assert contents(out) == before


def test_a_directory_of_files_and_what_is_said_of_it(wanted, tmp_path, texts, capsys):
    """A heading, a list and a table of figures in each file; nothing but figures is left out."""
    figures = "| 12.5 | 3 |"
    source = tmp_path / "pages"
    source.mkdir()
    for number, text in enumerate(texts):
        page = f"# Title\n\n- one\n- two\n\n{text}\n\n{figures}"
        (source / f"{number:03d}.md").write_text(page)
    for name in ("d.pdf", "caf\udce9.png"):  # of another encoding
        (source / name).touch()
    free = replace(wanted, source=source, documents=None)
    out = make(free, tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" MB of text in 150 files, read with --documents file")
    assert "not read: 1 .png, 1 .pdf (first 'caf\\udce9.png')" in lines
    record = json.loads((out / "corpus.json").read_text())
    assert record["rules"]["documents"] == "file"
    documents = [each for stem in ("train", "held") for each in documents_in(out, stem)]
    expected = sorted(f"# Title - one - two {text}" for text in texts)
    assert sorted(" ".join(each.split()) for each in documents) == expected
    lost = 150 * len(figures)
    assert record["characters"]["reasons"] == {"few letters": lost}
    assert record["characters"]["left_out"] == lost
    assert any(line.endswith(f" are left out (few letters {lost:,})") for line in lines)
    assert not any("warning" in line for line in lines)


def test_the_paragraphs_of_few_files_are_documents(wanted, whole, tmp_path):
    assert contents(make(replace(wanted, documents=None), tmp_path / "out")) == contents(whole)
    (tmp_path / "text").mkdir()
    wanted.source.rename(tmp_path / "text" / "text.txt")
    few = replace(wanted, source=tmp_path / "text", documents=None)
    assert contents(make(few, tmp_path / "other")) == contents(whole)
    with pytest.raises(DataError, match=r"has 1 document of .*, but 4 are needed; .*empty-line"):
        make(replace(few, documents="file"), tmp_path / "one")


def test_much_that_is_left_out_is_a_warning(wanted, tmp_path, texts, capsys):
    wanted.source.write_text("\n\n".join([*texts, *["too short by itself"] * 300]))
    make(wanted, tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    (warning,) = (line for line in lines if line.startswith("warning: "))
    assert warning.endswith(" characters are left out (too short 5,700)")


@pytest.mark.parametrize("sizes", [[1] * 40, [1] * 39 + [20], [1] * 6, [1] * 500])
def test_few_documents_are_held_out_by_about_their_share(sizes):
    """Four at least, of few two; no more than these, or twice the share of the characters."""
    rng = random.Random(3)
    for _ in range(100):
        found = sorted((rng.random(), size) for size in sizes)
        parts = [Part("", 1, 1, size, "") for _, size in found]
        lowest = [[int(place * 2**64), 1, size] for place, size in found]
        share = fitting_share(Cleaned(parts, [], sum(sizes), {}, lowest, [], 0), 1 / 16)
        held_out = [size for place, size in found if place < share]
        least = 4 if len(sizes) > 10 else 2
        needed = sum(size for place, size in found if place <= 1.25 * found[least - 1][0])
        assert len(held_out) >= least and sum(held_out) <= max(2 / 16 * sum(sizes), needed)
        before = sum(place < 1 / 16 for place, _ in found)
        if least <= before <= len(sizes) / 8:
            assert max(sizes) > 1 or share == 1 / 16


def test_a_given_vocabulary_is_used_and_kept_and_beside_the_text_is_no_text(
    wanted, whole, tmp_path
):
    given = replace(wanted, vocab_path=whole / "vocab.txt")
    assert contents(make(given, tmp_path / "out")) == contents(whole)
    (tmp_path / "text").mkdir()
    wanted.source.rename(tmp_path / "text" / "a.txt")
    vocab = shutil.copy(whole / "vocab.txt", tmp_path / "text")
    beside = replace(wanted, source=tmp_path / "text", vocab_path=Path(vocab))
    assert contents(make(beside, tmp_path / "beside")) == contents(whole)


def test_rare_characters_leave_a_vocabulary_room():
    common = {f"ab{number:x}": 50 + number for number in range(100)}
    rare = {chr(0x4E00 + number) + chr(0x5E00 + number): 1 for number in range(400)}
    found = with_frequent_characters(common | rare, 128)
    assert set(common) <= set(found) and len(found) < len(common | rare)
    assert with_frequent_characters(common, 128) == common
    assert with_frequent_characters(dict(reversed((common | rare).items())), 128) == found


def test_options_are_checked_before_the_text_is_read(wanted, tmp_path):
    (tmp_path / "text").mkdir()
    wanted.source.rename(tmp_path / "text" / "a.txt")
    wanted = replace(wanted, source=tmp_path / "text")
    for change, out, workers, problem in (
        ({"vocab_size": 100}, "out", 1, "model.vocab_size: is 100"),
        ({"settings": replace(SETTINGS, max_seq_length=4)}, "out", 1, "max_seq_length: is 4"),
        ({"settings": replace(SETTINGS, dupe_factor=-1)}, "out", 1, "dupe_factor: is -1"),
        ({}, "out", 0, "workers: is 0"),
        *(
            ({}, out, 1, r"--out: files in .* would be read as part of the text in")
            for out in ("text", "text/data", "text/../text/a/b", ".")
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            make(replace(wanted, **change), tmp_path / out, workers)
    assert [path.name for path in tmp_path.rglob("*")] == ["text", "a.txt"]


def test_what_was_lost_is_made_again(wanted, whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    shutil.rmtree(out / "text")  # which may go
    os.utime(wanted.source, (1, 1))  # the same text
    assert not prepare_corpus(wanted, out, workers=1)
    next((out / "train" / "shards").glob("*.hdf5")).unlink()
    (out / "vocab.txt").unlink()
    make(wanted, out)
    assert contents(out) == contents(whole)
    flip(next((out / "train" / "shards").glob("*.hdf5")), 8 * 3000)
    make(wanted, out)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}"])
@pytest.mark.parametrize("name", ["corpus.json", "text/*/job-00000.json"])
def test_a_damaged_record_is_one_line(wanted, whole, tmp_path, name, damage):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    path = sorted(out.glob(name))[-1]
    path.write_bytes(damage)
    if name != "corpus.json":
        (out / "corpus.json").unlink()
    with pytest.raises(DataError, match=f"^{path}: "):
        make(wanted, out)


def test_a_stopped_run_goes_on_with_the_same_text_alone(wanted, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    out, original = tmp_path / "out", wanted.source.read_text()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(preparing, "prepare_pair", interrupt)
        make(wanted, out)
    assert (out / "vocab.txt").exists()
    wanted.source.write_text(original.replace("wakord", "wakwort"))
    with pytest.raises(DataError, match="was prepared from a different text; use a new directory"):
        make(wanted, out)
