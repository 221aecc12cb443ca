"""The help of every command stands within its lines; old and shortened names are refused."""

import argparse
import re

import pytest

from mlperf_bert.__main__ import COMMANDS, _parser, main


def leaves(parser, *names):
    """Each command below `parser` that has no sub-commands, with the words that call it."""
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not groups:
        yield names, parser
    for group in groups:
        for choice in group._choices_actions:
            assert choice.help and len(choice.help) <= 72, (*names, choice.dest)
        for name, below in group.choices.items():
            yield from leaves(below, *names, name)


ALL = {
    words: parser
    for command in COMMANDS
    for words, parser in leaves(_parser([command]))
    if words[0] == command
}


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_stands_within_its_lines(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 0 and lines[0].startswith(f"usage: mlperf_bert {' '.join(words)} ")
    # A list of choices or of options, one of which must be given, is not broken by argparse.
    assert [line for line in lines if len(line) > 80 and not re.search(r"[{|]", line)] == []


def test_no_command_at_all_is_answered_by_the_help(capsys):
    assert main([]) == 2
    assert re.search("^ +train +train until", capsys.readouterr().err, re.MULTILINE)


def test_an_old_or_shortened_name_is_refused(capsys):
    for line in (
        "config show cpu_tiny --se run.seed=1",
        "config --get cpu_tiny",
        "report runs",
        "plan suggest --nodes 1 --gpus 8",
        "plan law --no-plot",
        "tune --config cpu_tiny --data d --space around --study s",
    ):
        with pytest.raises(SystemExit) as left:
            main(line.split())
        assert left.value.code == 2 and "error: " in capsys.readouterr().err
