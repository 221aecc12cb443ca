"""Every option and every command that a message names exists, for the command whose message it is.

Messages are the string literals of both packages, except docstrings.
"""

import argparse
import ast
import re

from mlperf_bert.__main__ import COMMANDS, DEBUG, VARIANTS, make_parser
from support import PACKAGE, TOOLS

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMAND = re.compile(r"\bmlperf_bert ([a-z][a-z-]+)([^`;]*)")
# Options of git, sinfo, sbatch, srun, torchrun, docker, hf, tensorboard, nvidia-smi and MLPerf's
# checker.
OF_OTHER_PROGRAMS = {
    *("--always", "--dirty", "--abbrev", "--exclude", "--noheader", "--format", "--job-name"),
    *("--ntasks-per-node", "--export", "--max-restarts", "--gpus-per-node", "--gpus-per-task"),
    *("--cpus-per-task", "--cpus", "--gpus", "--logdir", "--log", "--usage", "--editable"),
    *("--local-dir", "--revision", "--query-gpu"),
}
# What `pretrain` runs itself, or as a training: a message there must make sense for both.
SHARED_WITH_PRETRAIN = (
    *(f"mlperf_bert/{name}" for name in ("checkpoint", "data", "distributed", "evaluation")),
    *(f"mlperf_bert/{name}" for name in ("model", "optim", "run", "step", "train.py", "files.py")),
    "bert_tools/pretrain",
)
# Options there that `pretrain` lacks, and why it does not print them, or prints its command too.
NOT_OF_PRETRAIN = {
    ("mlperf_bert/checkpoint/resume.py", "--resume"): "`--new-run-by` takes its place",
    ("mlperf_bert/checkpoint/resume.py", "--run-dir"): "`--new-run-by` takes its place",
    ("mlperf_bert/checkpoint/manifest.py", "--resume"): "a run of its own has a training state",
    ("mlperf_bert/distributed/rendezvous.py", "--resume"): "torchrun cannot start it",
    ("mlperf_bert/run", "--resume"): "`--go-on-by` is printed too",
    ("mlperf_bert/run", "--run-dir"): "the message names the directory, which is in --out",
    ("mlperf_bert/run", "--run-index"): "an option of a command for `train`",
    ("mlperf_bert/run", "--checkpoint"): "an option of a command for `fill`",
    ("bert_tools/pretrain", "--segments"): "the message is of `prepare --corpus` too",
    ("bert_tools/pretrain/cli.py", "--labelled"): "an option of a command for `score`",
    ("bert_tools/pretrain/cli.py", "--resume"): "it starts `train`",
    ("bert_tools/pretrain/cli.py", "--run-dir"): "it starts `train`",
    ("bert_tools/pretrain/cli.py", "--go-on-by"): "it starts `train`",
    ("bert_tools/pretrain/cli.py", "--new-run-by"): "it starts `train`",
}


def options_of(*words):
    """The options of a command and of all its sub-commands."""
    found = {DEBUG}
    waiting = [make_parser(words)]
    while waiting:
        for action in waiting.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    return found


OPTIONS = {command: options_of(command) for command in COMMANDS}
for name, option in VARIANTS:
    OPTIONS[name] |= options_of(name, option)


def literals(tree):
    """The string literals of a file, without docstrings and without calls of `typed`."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    in_typed = {id(each) for call in typed_calls(tree) for each in ast.walk(call)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and not {id(node)} & (docstrings | in_typed):
            yield node.value


def typed_calls(tree):
    """The calls of `errors.typed` with the words of a command."""
    for node in ast.walk(tree):
        is_typed = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "typed"
        if is_typed and node.args and isinstance(node.args[0], ast.Constant):
            yield node


FILES = {
    str(path.relative_to(root.parent)): ast.parse(path.read_text(encoding="utf-8"))
    for root in (PACKAGE, TOOLS)
    for path in sorted(root.rglob("*.py"))
}


def test_a_message_names_options_and_commands_that_exist():
    any_command = set().union(*OPTIONS.values()) | OF_OTHER_PROGRAMS
    wrong = []
    for name, tree in FILES.items():
        for text in literals(tree):
            if not set(OPTION.findall(text)) <= any_command:
                wrong.append((name, text))
            for command, rest in COMMAND.findall(text):
                if command not in COMMANDS or not {*OPTION.findall(rest)} <= OPTIONS[command]:
                    wrong.append((name, text))
    assert wrong == []


def test_a_command_to_type_next_has_the_options_that_it_is_given():
    wrong = []
    for name, tree in FILES.items():
        for call in typed_calls(tree):
            words = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
            named = {each for each in words if isinstance(each, str) and each.startswith("--")}
            if not named <= OPTIONS.get(call.args[0].value, set()):
                wrong.append((name, ast.unparse(call)))
    assert wrong == []


def test_a_message_that_pretrain_prints_names_its_own_options():
    wrong = []
    for name, tree in FILES.items():
        if not name.startswith(SHARED_WITH_PRETRAIN) or name.endswith("pretrain/corpus.py"):
            continue
        for text in literals(tree):
            of_others = {each for _, rest in COMMAND.findall(text) for each in OPTION.findall(rest)}
            for option in {*OPTION.findall(text)} - OPTIONS["pretrain"] - OF_OTHER_PROGRAMS:
                is_known = any(
                    name.startswith(start) and option == known for start, known in NOT_OF_PRETRAIN
                )
                if option not in of_others and not is_known:
                    wrong.append((name, option, text))
    assert wrong == []
