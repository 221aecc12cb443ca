"""A published model is named OWNER/NAME: a stand-in of the hub, and the library without a network.

What the hub of today answers was not tried: these tests have no network.
"""

import fnmatch
import re
import shlex
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_cases import save_theirs, tensors_of

from bert_tools.pretrain.choose import as_checkpoint
from mlperf_bert.__main__ import main, make_parser
from mlperf_bert.checkpoint.manifest import read_manifest, resolve
from mlperf_bert.checkpoint.weights_directory import HUGGINGFACE, check_directory, is_hub_name
from mlperf_bert.distributed import spawn
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.run import console
from support import refusal, run_cli, write_synthetic_text

NAME, COMMIT = "an-owner/bert", "0123456789abcdef0123456789abcdef01234567"
ALSO_THERE = ("pytorch_model.bin", "modeling_bert.py", "onnx/model.safetensors", "README.md")
SHORT = ("schedule.decay_steps=1", "parallel.ranks_per_node=1", "run.device=cpu")
FAKE_LIBRARY = """
def snapshot_download(name, revision, allow_patterns):
    assert (name, revision) == ("an-owner/bert", "v1")
    return {folder!r}
"""


@pytest.fixture
def bert(tmp_path, words, monkeypatch):
    """A directory with what is on the hub, which is not the current directory."""
    save_theirs(tmp_path / "bert", "BertModel", max_position_embeddings=64)
    shutil.copy(words, tmp_path / "bert" / "vocab.txt")
    for name in ALSO_THERE:
        (tmp_path / "bert" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bert" / name).write_text("exit(1)")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "bert"


def as_cache(bert, home):
    """The library's cache after a download of the files that are asked for: links to contents."""
    cache = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (cache / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    shutil.copytree(bert, cache / "blobs")
    for path in (cache / "blobs").iterdir():
        if path.is_file() and path.name not in ALSO_THERE:
            (cache / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{path.name}")
    return cache / "snapshots" / COMMIT


@pytest.fixture
def hub(bert, tmp_path, monkeypatch):
    """The questions that the stand-in of the hub was asked: name, revision and patterns."""
    folder, asked = as_cache(bert, tmp_path / "hf"), []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(console, "SILENCE_S", (300.0, 300.0))  # no more lines on a busy machine
    return asked


def test_a_name_trains_as_its_directory_does(bert, hub, tmp_path, monkeypatch, capsys):
    """In this process alone: its workers and its rank have tests of their own."""
    monkeypatch.setattr("bert_tools.pretrain.choose.usable_cpus", lambda: {0})
    monkeypatch.setattr(spawn, "run_on_ranks", lambda words, _ranks, **_: main(words))
    (tmp_path / "text").mkdir()
    write_synthetic_text(tmp_path / "text" / "a.txt", 160, seed=0)  # the words of these weights
    words = ["pretrain", str(tmp_path / "text"), "--set=mlperf.enforce_rules=false"]
    words += [f"--set={each}" for each in SHORT]
    outs = {}
    for given in (bert, NAME):
        outs[given] = tmp_path / f"out{len(outs)}"
        assert main([*words, "--out", str(outs[given]), "--init-checkpoint", str(given)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"\nfound {NAME} on the Hugging Face hub: revision {COMMIT}\n") == 1
    theirs, ours = outs.values()
    for part in ("first_weights", "run/run_0/checkpoints"):
        folders = [resolve(out / part) for out in (theirs, ours)]
        files = [read_manifest(each).files["model.safetensors"].sha256 for each in folders]
        assert files[0] == files[1], part
    assert (theirs / "exported/vocab.txt").read_bytes() == (bert / "vocab.txt").read_bytes()
    origin = read_manifest(ours / "first_weights").origin
    assert (origin["name"], origin["form"]) == ("bert", "BertModel")
    assert (origin["hub_name"], origin["hub_revision"]) == (NAME, COMMIT)
    card = " ".join((ours / "exported" / "README.md").read_text().split())
    assert f"huggingface, bert, BertModel, {NAME}, {COMMIT}" in card
    ((name, revision, patterns),) = hub
    assert (name, revision) == (NAME, None)
    assert {"config.json", "model.safetensors", "vocab.txt", "tokenizer.json"} <= set(patterns)
    for path in ALSO_THERE:
        assert not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
    shutil.rmtree(ours / "exported")
    assert main([*words, "--out", str(ours), "--init-checkpoint", NAME]) == 0
    assert len(hub) == 1 and "converted" not in capsys.readouterr().out


def test_a_revision_is_passed_on_and_others_are_refused(hub):
    out = Path("first_weights")
    assert as_checkpoint(Path(f"{NAME}@refs/pr/1"), out) == out
    assert hub[0][:2] == (NAME, "refs/pr/1")
    assert read_manifest(out).origin["name"] == "bert"
    for same in (f"{NAME}@refs/pr/1", f"{NAME}@{COMMIT}"):
        assert as_checkpoint(Path(same), out) == out
    for other in (NAME, f"{NAME}@v2", "an-owner/other"):
        with pytest.raises(ConfigError, match=f"from weights other than {other}; pass another"):
            as_checkpoint(Path(other), out)
    assert len(hub) == 1


def test_convert_takes_a_name_too(bert, hub, capsys):
    command = ["convert", f"{NAME}@v1", "--from", "huggingface", "--missing", "draw", "--out"]
    assert main([*command, "first"]) == 0
    assert f"found {NAME}@v1 on the Hugging Face hub: revision {COMMIT}" in capsys.readouterr().out
    assert read_manifest(Path("first")).origin["hub_name"] == f"{NAME}@v1"
    assert main(["convert", str(bert), *command[2:], "second"]) == 0
    first, second = map(tensors_of, (Path("first"), Path("second")))
    assert all(first[name].equal(second[name]) for name in first | second)


def test_a_directory_is_no_name(bert, hub):
    shutil.copytree(bert, NAME)
    assert as_checkpoint(Path(NAME), Path("out")) == Path("out")
    assert hub == [] and "hub_name" not in read_manifest(Path("out")).origin
    later = shutil.copytree(bert, Path("later") / Path(NAME).name)
    assert as_checkpoint(later, Path("out")) == Path("out")  # the same weights elsewhere
    with (later / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    with pytest.raises(ConfigError, match="from weights other than later"):
        as_checkpoint(later, Path("out"))
    shutil.rmtree(NAME)
    assert as_checkpoint(Path(NAME), Path("out")) == Path("out")  # a directory that is gone
    with pytest.raises(ConfigError, match="from weights other than an-owner/other"):
        as_checkpoint(Path("an-owner/other"), Path("out"))
    assert hub == []


def test_mistyped_paths_are_not_sent_to_the_hub(hub, capsys):
    Path("runs/first").mkdir(parents=True)
    for given, told in (
        ("runs/fisrt", "did you mean runs/first?"),
        ("rnus/first", "did you mean runs/first?"),
        ("runs/other", "or the name of a published model, OWNER/NAME"),
    ):
        error = refusal(capsys, "convert", given, "--from", "huggingface", "--out", "out")
        here = f"{told} (for the published model of this name, pass {given}@main)\n"
        assert f"{given}: no such directory; " in error and error.endswith(here)
    with pytest.raises(CheckpointError, match=r"OWNER/NAME$"):
        check_directory(Path("runs/other@v1"), HUGGINGFACE)  # has a revision already
    for path in ("/a/b", "a", "a/b/c", "../b", "a/.b", "-a/b", "a/b c", "a/b@", "a/b\n", "ä/b"):
        assert not is_hub_name(Path(path)), path
    assert hub == []
    assert is_hub_name(Path("runs/other@main")) and is_hub_name(Path("a/b-1.5_c"))


@pytest.mark.parametrize("given", [NAME, f"{NAME}@v1"])
def test_train_says_how_to_convert(given, tiny_config, synthetic_data, hub, capsys):
    place = ("--config", tiny_config, "--data", synthetic_data, "--run-dir", "run")
    error = refusal(capsys, "train", *place, "--init-checkpoint", given)
    (command,) = re.findall(r"published model of this name, `([^`]+)`\)$", error, re.MULTILINE)
    words = shlex.split(command)
    words = words[words.index("convert") :]
    assert make_parser(words).parse_args(words).source == Path(given)
    assert main([*words, "--missing", "draw"]) == 0
    assert hub == [(NAME, "v1" if "@" in given else None, hub[0][2])]
    (Path("runs") / "berts").mkdir(parents=True)
    mistyped = ("--init-checkpoint", "runs/bert")
    assert refusal(capsys, "train", *place, *mistyped).endswith("; did you mean runs/berts?\n")


def test_the_library_is_missing(bert, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = refusal(capsys, "convert", f"{NAME}@v1", "--from", "huggingface", "--out", "out")
    assert f"{NAME}@v1 (no such directory): needs huggingface-hub, but it is not " in error
    command = f"`hf download {NAME} --revision v1 --local-dir DIR`"
    assert error.endswith(f", or run {command} on a machine with a network, and pass DIR\n")


@pytest.mark.longest
def test_the_library_is_asked_in_a_process_of_its_own(bert, tmp_path):
    folder = as_cache(bert, tmp_path / "hf")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/huggingface_hub.py").write_text(FAKE_LIBRARY.format(folder=str(folder)))
    paths = [str(tmp_path / "site"), *(each for each in sys.path if each)]
    words = ("convert", f"{NAME}@v1", "--from", "huggingface", "--missing", "draw", "--out", "out")
    done = run_cli(*words, PYTHONPATH=":".join(paths))
    assert (done.returncode, done.stderr) == (0, "")
    assert read_manifest(Path("out")).origin["hub_revision"] == COMMIT


@pytest.mark.longest
def test_without_a_network_the_real_library_reads_its_cache(bert, tmp_path):
    words = ("convert", NAME, "--from", "huggingface", "--missing", "draw", "--out", "out")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = run_cli(*words, **offline)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{NAME} (no such directory): cannot be downloaded (LocalEntryNot" in done.stderr
    told = f"check the name, or run `hf download {NAME} --local-dir DIR` on a machine with a "
    assert told in done.stderr and not Path("out").exists()
    as_cache(bert, tmp_path / "hf")
    done = run_cli(*words, **offline)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert read_manifest(Path("out")).origin["hub_revision"] == COMMIT


@pytest.mark.parametrize(
    "said", ["401 Client Error.\n\nRepository Not Found for url", "", "a\x1bb"]
)
def test_what_the_hub_says_is_one_line(said, monkeypatch, capsys):
    def snapshot_download(*_, **__):
        raise huggingface_hub.errors.HFValidationError(said)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    error = refusal(capsys, "convert", "no-owner/model", "--from", "huggingface", "--out", "out")
    first = said.partition("\n")[0].replace("\x1b", "\\x1b")
    said = f"cannot be downloaded (HFValidationError: {first}); check"
    assert f"no-owner/model (no such directory): {said}" in error


def test_a_model_without_safetensors_is_refused(bert, hub, tmp_path):
    (tmp_path / "hf/hub/models--an-owner--bert/snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"an-owner/bert: has no model\.safetensors on the"):
        as_checkpoint(Path(NAME), Path("out"))
