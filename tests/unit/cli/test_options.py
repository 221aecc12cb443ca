"""Every command explains itself: a description, an example that works, and help for options."""

import argparse
import re
import shlex

import pytest

from mlperf_bert.__main__ import COMMANDS, main, make_parser
from mlperf_bert.arguments import help_of


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
    for words, parser in leaves(make_parser([command]))
    if words[0] == command
}
ALL["prepare", "--corpus", "TEXT"] = (
    make_parser(["prepare", "--corpus"])._actions[-1].choices["prepare"]
)
MOST_WITHOUT_TITLES, MOST_IN_A_GROUP = 7, 8


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_stands_within_its_lines(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    names = [word for word in words if word.islower() and not word.startswith("-")]
    assert left.value.code == 0 and lines[0].startswith(f"usage: mlperf_bert {' '.join(names)} ")
    # A list of choices or of options, one of which must be given, is not broken by argparse.
    assert [line for line in lines if len(line) > 80 and not re.search(r"[{|]", line)] == []


def options_of(parser):
    """The arguments that a user sees, apart from --help."""
    return [
        each
        for each in parser._actions
        if each.help is not argparse.SUPPRESS and each.dest != "help"
    ]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_command_is_described(words):
    text = ALL[words].description
    assert text.endswith(".") and 1 <= len(re.findall(r"\.(?= |$)", text)) <= 4, text


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_an_example_works(words):
    title, *examples = ALL[words].epilog.splitlines()
    assert title in ("example:", "examples:") and examples
    for example in examples:
        program, *typed = shlex.split(example.partition(" > ")[0])
        assert program == "mlperf_bert" and len(example) <= 80, example
        args = make_parser(typed).parse_args(typed)  # exits if it cannot be parsed
        assert callable(args.run)
    assert any(example.split()[1:][: len(words[:1])] == [words[0]] for example in examples)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_option_is_explained_and_long_lists_have_titles(words):
    for option in options_of(ALL[words]):
        name, text = option.option_strings or option.dest, help_of(option)
        assert text and not text.endswith("."), name
        assert not text[0].isupper() or text[1].isupper() or text.startswith("SQuAD"), (name, text)
        if option.option_strings and option.default not in (None, False, [], argparse.SUPPRESS):
            assert "default: " in text, name
    groups = [group._group_actions for group in ALL[words]._action_groups]
    assert max(len(group) for group in groups) <= MOST_IN_A_GROUP
    if len(options_of(ALL[words])) > MOST_WITHOUT_TITLES:
        assert len([group for group in groups if group]) > 2


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
