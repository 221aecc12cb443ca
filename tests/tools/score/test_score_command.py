"""`score` as a user calls it, on tiny random models."""

import json
import shlex
import shutil

import pytest
from score_cases import opinions, write_lines

from mlperf_bert.__main__ import main, make_parser
from mlperf_bert.checkpoint.manifest import resolve
from mlperf_bert.errors import CheckpointError
from mlperf_bert.run import console
from mlperf_bert.run.console import ProgressLines
from support import refusal


def score(*words):
    """Run `score ...` in this process; its status."""
    return main(["score", *map(str, words)])


def means(result):
    return {each["method"]: each["accuracy"]["mean"] for each in result["labelled"]["means"]}


@pytest.fixture(scope="module")
def out(tmp_path_factory, model, other, labelled, rated):
    """A directory with the record and the picture of a whole comparison."""
    directory = tmp_path_factory.mktemp("out") / "new"
    words = ("--against", other, "--pairs", rated, "--seeds", 2, "--out", directory, "--json")
    assert score(model, "--labelled", labelled, *words) == 0
    return directory


def test_every_way_beats_chance_on_separable_texts(out):
    found = means(json.loads((out / "score.json").read_text()))
    chance = found.pop("most frequent class")
    assert chance == 0.5 and len(found) == 5
    assert min(found.values()) > 0.8, found


def test_the_record_holds_scores_of_each_seed_and_differences(out, model, other):
    result = json.loads((out / "score.json").read_text())
    assert result["schema_version"] == 2
    assert (result["model"]["name"], result["against"]["name"]) == ("small", "other")
    assert result["model"]["max_length"] == 16  # of its positions, not the 128 of the option
    assert result["against"]["peak_learning_rate"] == 2 * result["model"]["peak_learning_rate"]
    labelled = result["labelled"]
    assert (labelled["train"], labelled["test"], labelled["classes"]) == (60, 20, 2)
    assert len(labelled["scores"]) == 6 * 2 and {e["seed"] for e in labelled["scores"]} == {1, 2}
    compared = {(each["method"], each["compared_with"]) for each in labelled["differences"]}
    ways = ("fine-tuned", "frozen features")
    assert compared == {
        *((f"{name}, {way}", "bag of words") for name in ("small", "other") for way in ways),
        *((f"small, {way}", f"other, {way}") for way in ways),
    }
    pairs = result["pairs"]
    assert [each["method"] for each in pairs["correlations"]] == ["small", "other", "tf-idf cosine"]
    for each in pairs["correlations"]:
        assert each["low"] <= each["spearman"] <= each["high"]
    assert pairs["correlations"][2]["spearman"] > 0.8  # the number counts shared words


def test_the_picture_is_a_png(out):
    assert (out / "score.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["score.json", "score.png"]


def test_two_runs_give_equal_scores(model, labelled, capsys):
    printed = []
    for _ in range(2):
        assert score(model, "--labelled", labelled, "--seeds", 1, "--epochs", 2, "--json") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    result = json.loads(printed[0])
    assert result["against"] is None and "pairs" not in result
    assert {
        each["half_width"]
        for m in result["labelled"]["means"]
        for each in (m["accuracy"], m["macro_f1"])
    } == {None}


def test_the_table_ends_with_a_sentence(model, labelled, rated, capsys):
    words = ("--no-fine-tune", "--seeds", 3, "--pairs", rated)
    assert score(model, "--labelled", labelled, *words) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split("  ")[0] == "method" and "small, frozen features" in said.out
    assert "fine-tuned" not in said.out
    assert lines[-2].startswith("small compared with the bag of words: ")
    assert lines[-1].startswith("small compared with tf-idf cosine: ")
    assert "embedding" not in said.out  # progress is on stderr


def test_pairs_of_texts_are_classified(tmp_path, model, capsys):
    rows = [
        {**row, "text_pair": row["text"] if number % 4 < 2 else "the song", "label": number % 4 < 2}
        for number, row in enumerate(opinions(80))
    ]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    assert score(model, "--labelled", path, "--seeds", 1, "--epochs", 1, "--json") == 0
    found = means(json.loads(capsys.readouterr().out))
    assert found["small, frozen features"] > 0.9 and found["bag of words"] > 0.9


def test_mistakes_are_refused_in_one_line(tmp_path, model, labelled, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "no_words"):
        (tmp_path / name).mkdir()
    (tmp_path / "no_words" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    good = ("--labelled", labelled)
    for words, said in (
        ((model,), "score: has nothing to score; add --labelled FILE"),
        ((model, *good, "--against", model), "--against: is the model itself; pass"),
        ((model, *good, "--seeds", 0), "--seeds: must be at least 1, not 0"),
        ((model, *good, "--epochs", 0), "use --no-fine-tune for none"),
        ((model, *good, "--max-length", 2), "--max-length: must be at least 8"),
        ((model, *good, "--learning-rate", "nan"), "--learning-rate: must be between 0 and 1"),
        ((model, *good, "--out", "file"), "file: File exists"),
        (("lost", *good), "lost: no such directory"),
        ((model.parent / "smal", *good), f"did you mean {model}?"),
        (("empty", *good), "empty: has no config.json; pass one written by save_pretrained()"),
        (("no_words", *good), "no_words: has no tokenizer; save the tokenizer"),
        ((model, "--against", "empty", *good), "empty: has no config.json"),
        ((model, "--labelled", "lost.csv"), "lost.csv: No such file"),
    ):
        assert said in refusal(capsys, "score", *words), words


def test_damaged_or_other_models_are_refused(tmp_path, model, labelled, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks on the terminal"))
    for name, damage, said in (
        ("code", {"config.json": b'{"auto_map": {"AutoConfig": "a.C"}}'}, "custom code"),
        ("cut", {"model.safetensors": b"\0" * 9}, "transformers cannot load it ("),
        ("unknown", {"config.json": b'{"model_type": "gpt9"}'}, "transformers cannot load it ("),
        ("weights", {"config.json": {"num_hidden_layers": 3}}, "lacks 16 weights of its archit"),
        ("pad", {"tokenizer_config.json": {"pad_token": None}}, "without a padding token"),
    ):
        copied = tmp_path / name
        copied.mkdir()
        for path in model.iterdir():
            contents = damage.get(path.name, path.read_bytes())
            if isinstance(contents, dict):
                contents = json.dumps({**json.loads(path.read_text()), **contents}).encode()
            (copied / path.name).write_bytes(contents)
        assert said in refusal(capsys, "score", copied, "--labelled", labelled), name


def test_a_published_model_is_to_be_downloaded_first(tmp_path, labelled, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, files in (("an/e5", "an/e5"), ("an/e5@v1", "an/e5 --revision v1")):
        error = refusal(capsys, "score", name, "--labelled", labelled)
        assert f"{name}: no such directory; pass one written by save_pretrained()" in error
        assert error.endswith(f" with `hf download {files} --local-dir DIR`, and pass DIR\n")
    (tmp_path / "an" / "encoder").mkdir(parents=True)
    other = refusal(capsys, "score", "an/exported", "--labelled", labelled)
    assert "an/exported: no such directory; pass one" in other and "hf download" not in other
    error = refusal(capsys, "score", "an/encodr", "--labelled", labelled)
    assert error.endswith("did you mean an/encoder?\n")
    assert "published" not in refusal(capsys, "score", "an/encoder", "--labelled", labelled)


def test_positions_of_padding_are_not_counted(tmp_path, model):
    import torch
    from transformers import RobertaConfig, RobertaModel

    from bert_tools.score.encoder import load

    folder = shutil.copytree(model, tmp_path / "roberta")
    RobertaModel(
        RobertaConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=18,
            pad_token_id=1,
        )
    ).save_pretrained(folder)
    encoder = load(folder, "roberta", torch.device("cpu"), 128)
    assert encoder.max_length == 16
    assert encoder.embed(["film " * 40], lambda _: None).shape == (1, 16)


def test_a_divergence_names_the_learning_rate(model, labelled, capsys, monkeypatch):
    from bert_tools.score import classify

    monkeypatch.setattr(
        classify.nn.functional, "cross_entropy", lambda logits, _: logits.sum() * float("nan")
    )
    error = refusal(capsys, "score", model, "--labelled", labelled, "--learning-rate", 0.5)
    assert "--learning-rate: is 0.5, but the training diverged" in error
    assert error.endswith("; lower --learning-rate\n")


@pytest.mark.parametrize(
    "place",
    [".", "checkpoints", "run_0/checkpoints", "run/run_0/checkpoints", "run_10/checkpoints"],
)
def test_a_run_of_ours_is_to_be_exported_first(tmp_path, place, labelled, capsys):
    folder = tmp_path / "my model" / place
    folder.mkdir(parents=True)
    (folder / "LATEST").touch()
    if place == "run_10/checkpoints":  # of `phases`, whose last one has no checkpoints yet
        for name in ("run_0", "run_9", "run_11"):
            (tmp_path / "my model" / name / "checkpoints").mkdir(parents=True)
            if name != "run_11":
                (tmp_path / "my model" / name / "checkpoints" / "LATEST").touch()
        with pytest.raises(CheckpointError, match=f"pass {folder}$"):
            resolve(tmp_path / "my model")
    error = refusal(capsys, "score", tmp_path / "my model", "--labelled", labelled)
    command = error.split("`")[1]
    words = shlex.split(command)
    words = words[words.index("export") :]
    args = make_parser(words).parse_args(words)
    assert (args.checkpoint, args.out) == (folder, tmp_path / "my model-exported")
    exported = tmp_path / "my model" / "exported"
    exported.mkdir()
    (exported / "config.json").touch()
    assert f"pass {exported}" in refusal(
        capsys, "score", tmp_path / "my model", "--labelled", labelled
    )


def test_progress_has_a_rate_and_the_time_left(monkeypatch):
    said = []

    class Lines(ProgressLines):
        def is_due(self):
            return True

        def line(self, text):
            said.append(text)

    lines = Lines()
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    advance = lines.counter("embedding", "texts", 100)
    advance(0)
    advance(20)
    advance(20)
    assert said[1] == "embedding: 40 of 100 texts, 10.0 per s, 0:00:06 left"
