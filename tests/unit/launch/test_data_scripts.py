"""The scripts that the MLPerf rules name: fetch, prepare and verify the data; small stand-ins."""

import hashlib
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlperf_bert.data.index import Manifest
from support import PACKAGE, REPOSITORY, run_process

SCRIPTS = PACKAGE.parent
GOLDEN = REPOSITORY / "tests" / "golden" / "data"
CONTENTS = {
    "eval.txt": b"held out " * 50,
    "vocab.txt": b"[PAD]\n",
    "part-00000-of-00002": b"first part " * 200,
    "part-00001-of-00002": b"second part " * 200,
}
UNKNOWN = {"vocab.txt"}  # neither size nor md5 in the table


def call(script, *words, **variables):
    unset = dict.fromkeys(("SOURCE", "FILES", "TEXTDIR", "DATADIR", "ONLY", "WORKERS"), "")
    given = {name: str(value) for name, value in variables.items()}
    return run_process(SCRIPTS / script, *words, PYTHON=sys.executable, **unset | given)


def refused(done, message):
    lines = [line for line in done.stderr.splitlines() if ".sh: error: " in line]
    return done.returncode == 2 and len(lines) == 1 and message in lines[0]


class Official:
    """A place with all files, their table, and a directory to fetch them to."""

    def __init__(self, directory):
        self.source = directory / "the source"
        self.target = directory / "target"
        self.table = directory / "files.txt"
        self.source.mkdir()
        lines = ["# bytes md5 name"]
        for name, contents in CONTENTS.items():
            (self.source / name).write_bytes(contents)
            known = f"{len(contents)} {hashlib.md5(contents).hexdigest()}"
            lines.append(f"{'- -' if name in UNKNOWN else known} {name}")
        self.table.write_text("\n".join(lines) + "\n")

    def fetch(self, *words, source=None):
        settings = {"SOURCE": source or self.source, "FILES": self.table}
        return call("download_dataset.sh", *words, self.target, **settings)

    def fetched(self):
        return {path.name: path.read_bytes() for path in self.target.iterdir()}


@pytest.fixture
def official(tmp_path):
    return Official(tmp_path)


@pytest.fixture
def server(official):
    """The source behind HTTP, by a server that knows whole files only."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(official.source))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()
        thread.join()


def test_all_files_and_then_nothing_again(official):
    only = official.fetch("--only", "eval")  # what evaluation needs
    assert only.returncode == 0, only.stderr
    assert "[1/2] eval.txt: downloaded, md5 correct\n" in only.stdout
    assert "[2/2] vocab.txt: downloaded, md5 unknown\n" in only.stdout
    assert sorted(official.fetched()) == ["eval.txt", "vocab.txt"]
    assert official.fetch().returncode == 0
    assert official.fetched() == CONTENTS
    for path in official.source.iterdir():
        path.unlink()
    again = official.fetch()
    assert again.returncode == 0 and again.stdout.count(": already downloaded\n") == 4


def test_a_cut_file_goes_on_where_it_was_cut(official):
    name = "part-00000-of-00002"
    half = len(CONTENTS[name]) // 2
    official.target.mkdir()
    (official.target / f"{name}.part").write_bytes(CONTENTS[name][:half])
    # What is before the cut is not read again: here it would make the file wrong.
    (official.source / name).write_bytes(bytes(half) + CONTENTS[name][half:])
    assert official.fetch("--only", name).returncode == 0
    assert official.fetched() == {name: CONTENTS[name]}


@pytest.mark.parametrize("part", [b"something else", bytes(10_000), CONTENTS["eval.txt"]])
def test_a_part_that_cannot_go_on_is_fetched_anew(official, part):
    official.target.mkdir()
    (official.target / "eval.txt.part").write_bytes(part)
    assert official.fetch("--only", "eval.txt").returncode == 0
    assert official.fetched() == {"eval.txt": CONTENTS["eval.txt"]}


def test_over_http_also_without_ranges(official, server):
    official.target.mkdir()
    (official.target / "eval.txt.part").write_bytes(CONTENTS["eval.txt"][:10])
    done = official.fetch(source=server)
    assert done.returncode == 0, done.stderr
    assert official.fetched() == CONTENTS
    (official.target / "eval.txt").unlink()
    missing = official.fetch(source=f"{server}/nowhere")
    assert refused(missing, "eval.txt: download from SOURCE failed")


def test_a_wrong_file_is_named_and_not_kept(official):
    (official.source / "part-00001-of-00002").write_bytes(b"x" * 2400)
    done = official.fetch()
    assert refused(done, "part-00001-of-00002: the file from SOURCE has md5 ")
    assert "part-00001-of-00002" not in official.fetched()
    (official.source / "eval.txt").write_bytes(b"short")
    (official.target / "eval.txt").unlink()
    assert refused(official.fetch(), "eval.txt: the file from SOURCE has 5 bytes, not 450")
    (official.target / "part-00000-of-00002").write_bytes(b"changed")
    wrong = official.fetch("--only", "train")
    assert refused(wrong, "part-00000-of-00002: has 7 bytes, not 2200; remove this file")


def test_mistakes_of_the_call(official):
    target = official.target
    assert refused(call("download_dataset.sh", target), "SOURCE: not set")
    assert refused(official.fetch(source=target / "x"), "SOURCE: no such directory")
    assert refused(
        call("download_dataset.sh", SOURCE=target), "0 arguments instead of one directory"
    )
    assert refused(official.fetch("-x"), "unknown option '-x'")
    assert refused(official.fetch("--only", "nothing"), "no file matches 'nothing'")
    assert refused(call("verify_dataset.sh", DATADIR=target), "no such directory")
    assert refused(call("verify_dataset.sh", "-x", DATADIR=target.parent), "unknown argument '-x'")
    assert refused(call("init_datasets.sh", TEXTDIR=target.parent), "DATADIR: not set")
    assert refused(call("init_datasets.sh", DATADIR=target), "TEXTDIR: no such directory")
    (target.parent / "part-00000-of-00002").touch()
    cut = call("init_datasets.sh", TEXTDIR=target.parent, DATADIR=target)
    assert refused(cut, "has 1 of 2 parts") and not target.exists()


def test_a_name_of_the_table_stays_in_the_directory(official):
    (official.source.parent / "outside").write_text("another's")
    table = official.table.read_text()
    for name in ("../outside", "/tmp/outside", "a/b", "..", ".", ""):
        official.table.write_text(f"{table}- - {name}\n")
        assert refused(official.fetch(), f"'{name}' in {official.table} is not a plain file name")
        assert not official.target.exists()


SHOWN = ("download_dataset.sh", "init_datasets.sh", "verify_dataset.sh", "launch/docker.sh")


@pytest.mark.parametrize("script", SHOWN)
def test_help_is_the_comment_at_the_top(script):
    _, *comment = (SCRIPTS / script).read_text().partition("\nset -euo")[0].splitlines()
    shown = [line.removeprefix("#").removeprefix(" ") for line in comment]
    done = call(script, "-h")
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", shown)


def test_the_official_table():
    lines = (SCRIPTS / "dataset_files.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    names = {name for _, _, name in rows}
    assert len(names) == len(rows)
    assert {f"part-{n:05}-of-00500" for n in range(500)} < names
    known = {name: (size, md5) for size, md5, name in rows if size != "-"}
    assert known["eval.txt"] == ("32851144", "2a220f790517261547b1b45ed3ada07a")
    assert known["vocab.txt"] == ("231508", "64800d5d8528ce344256daf115d4965e")
    # TensorFlow 1's, not the file of 1,344,982,997 bytes.
    assert known["model.ckpt-28252.data-00000-of-00001"][0] == "4034713312"
    assert {name.split("-")[0] for name in names - known.keys()} == {"part"}
    assert all(len(md5) == 32 and int(size) > 0 for size, md5 in known.values())


def test_sets_are_made_of_the_text_and_verified(tmp_path):
    """Held-out examples can be picked from one text only, so each set has a call of its own."""
    text, data = tmp_path / "text", tmp_path / "data"
    text.mkdir()
    documents = (GOLDEN / "own_sentences.txt").read_text().strip().split("\n\n")
    third = len(documents) // 3
    for i, name in enumerate(["part-00000-of-00002", "part-00001-of-00002", "eval.txt"]):
        chosen = documents[i * third : (i + 1) * third]
        (text / name).write_text("\n\n".join(chosen) + "\n")
    (text / "vocab.txt").write_bytes((GOLDEN / "own_vocab.txt").read_bytes())
    small = ("--max-seq-length", 64, "--max-predictions", 10, "--dupe-factor", 4)
    said = {}
    for only, options in (("eval", (*small, "--pick-eval", 8)), ("train", ())):
        places = {"TEXTDIR": text, "DATADIR": data}
        done = call("init_datasets.sh", *options, **places, ONLY=only, WORKERS=1)
        assert done.returncode == 0, done.stdout + done.stderr
        said[only] = done.stderr
    assert "NOT" not in said["eval"]
    assert "does NOT have the published number of 156,726,829 examples" in said["train"]
    train, held_out = (Manifest.load(data / name) for name in ("train", "eval"))
    parts = [f"part-0000{number}-of-00002.hdf5" for number in range(2)]
    assert [shard.file for shard in train.shards] == parts
    assert (train.seed, train.dupe_factor, train.max_seq_length) == (12345, 10, 512)
    assert (held_out.num_samples, held_out.dupe_factor) == (8, 4)
    done = call("verify_dataset.sh", "--full", DATADIR=data)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train" in done.stdout and "eval" in done.stdout
