"""The options of a config: what --help says of them, and what they hold."""

import argparse
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.config.options import add_config, find_config
from support import CONFIGS


def test_a_config_and_all_its_changes() -> None:
    parser = argparse.ArgumentParser()
    add_config(parser, required=False)
    assert vars(parser.parse_args([])) == {"config": None, "set": []}
    given = parser.parse_args(["--config", "a.toml", "--set", "run.seed=1", "--set", "run.seed=2"])
    assert vars(given) == {"config": Path("a.toml"), "set": ["run.seed=1", "run.seed=2"]}


def test_two_commands_do_not_share_their_changes() -> None:
    first, second = argparse.ArgumentParser(), argparse.ArgumentParser()
    for parser in (first, second):
        add_config(parser)
    first.parse_args(["--config", "a.toml", "--set", "run.seed=1"])
    assert second.parse_args(["--config", "a.toml"]).set == []


def test_a_shipped_config_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("cpu_tiny", str(CONFIGS / "cpu_tiny.toml")):
        assert main(["config", given, "--get", "run.max_steps"]) == 0
    assert capsys.readouterr().out == "6000\n6000\n"
    Path("cpu_tiny").write_text("[run]\nmax_steps = 7\n")
    assert find_config("cpu_tiny") == Path("cpu_tiny")  # a file that is there comes first


@pytest.mark.parametrize(
    ("given", "remedy"),
    [("cpu_tinny", "did you mean cpu_tiny or encoder_cpu_tiny?"), ("zzz", f"in {CONFIGS}")],
)
def test_an_unknown_name_says_which_there_are(
    given: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", given, "--data", "."]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mlperf_bert: error: {given}: is neither a file nor the name of a")
    assert error.endswith(f"{remedy}\n") and error.count("\n") == 1


@pytest.mark.parametrize("command", [["config"], ["train"], ["stage-data"], ["plan", "buckets"]])
def test_help_explains_them(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "FILE TOML file" in said and "--set SECTION.KEY=VALUE override a setting" in said
