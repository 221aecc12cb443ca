"""The options of a config: what --help says of them, and what they hold."""

import argparse
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.config.options import add_config


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
    first.parse_args(["--config", "a", "--set", "run.seed=1"])
    assert second.parse_args(["--config", "a"]).set == []


@pytest.mark.parametrize("command", [["config"], ["train"], ["stage-data"], ["plan", "buckets"]])
def test_help_explains_them(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "FILE TOML file" in said and "--set SECTION.KEY=VALUE override a setting" in said
