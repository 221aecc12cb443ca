"""The closed submission as the reviewer's page has it, command by command, in a small.

What is small: a checkpoint that TensorFlow wrote, the text, and a config of that model. A stand-in
for docker's program does what `docker run` is asked, without a container.
"""

import json
import random
import re
import sys
import time

import pytest

from bert_tools.package.own_checks import UNKNOWN
from mlperf_bert.config.files import load_config
from support import CONFIGS, copy_checkout, mlperf_records, run_process
from tensorflow_cases import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    VOCAB_SIZE,
    write_published,
)

NAMED = "dgxa100_1x8x56x1"
RUNS = 10
# All that `package` may find, and why: the rules are off, and the batch is not MLPerf's.
SMALL = (
    "the run was started with mlperf.enforce_rules = false",
    "RCP Test Failed: Missing RCP, please submit RCP with BS = 32",
)
CONFIG = f"""
[run]
device = "cpu"
[model]
vocab_size = {VOCAB_SIZE}
hidden_size = {HIDDEN}
num_layers = {LAYERS}
num_heads = {HEADS}
intermediate_size = {INTERMEDIATE}
max_position_embeddings = {POSITIONS}
[data]
max_seq_length = {POSITIONS}
max_predictions = 2
[parallel]
local_batch_size = 32
[optim]
name = "lamb"
learning_rate = 2e-2
[schedule]
warmup_steps = 5
decay_steps = 300
[eval]
target_accuracy = 0.72
interval_samples = 640
[mlperf]
division = "closed"
enforce_rules = false
"""
# A place inside is the one outside; the command is run in the tree, as in the image.
DOCKER = """#!/bin/bash
case $1 in
--version) echo "Docker version 29" ;;
run)
    settings=() place='source=(.*),target=([^,]*)'
    while [ "$1" != mlperf-bert ]; do
        [ "$1" != --env ] || settings+=("${2/%=$inside/=$outside}")
        if [ "$1" = --mount ] && [[ $2 =~ $place ]]; then
            outside=${BASH_REMATCH[1]} inside=${BASH_REMATCH[2]} # of the next --env
        fi
        shift
    done
    shift
    unset CONFIG DATADIR INIT_CHECKPOINT LOGDIR NEXP # a container has what it is given
    exec env "${settings[@]}" "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this repository with `text`, as download_dataset.sh leaves it, and the config."""
    tree = copy_checkout(tmp_path_factory.mktemp("walk") / "tree")
    text = tree / "text"
    words = write_published(text)
    for seed, (name, documents) in enumerate({"part-00000-of-00001": 300, "eval.txt": 60}.items()):
        (text / name).write_text(one_word_mostly(words, documents, random.Random(seed)))
    (tree / "small.toml").write_text(CONFIG)
    (tree / "docker").write_text(DOCKER)
    (tree / "docker").chmod(0o755)
    system = tree / "systems" / "dgxa100_n1_pytorch.json"
    described = json.loads(system.read_text().replace(UNKNOWN, "measured"))
    system.write_text(json.dumps(described | {"accelerators_per_node": "1"}))
    return tree


def one_word_mostly(words, documents, rng):
    """Text whose commonest word is nine in ten, so that 0.72 is reached within a second."""
    weights = [9.0, *[1 / len(words)] * (len(words) - 1)]
    lines = (" ".join(rng.choices(words, weights, k=rng.randint(6, 12))) for _ in range(10**6))
    return "\n\n".join("\n".join(next(lines) for _ in range(6)) for _ in range(documents)) + "\n"


def commands():
    """The page's, with the small config's name in place of a shipped one's."""
    text = (CONFIGS.parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"command by command\n.*?```sh\n(.*?)```", text, re.DOTALL)
    assert NAMED in block and load_config(CONFIGS / f"{NAMED}.toml").mlperf.division == "closed"
    small = block.replace("\\\n", " ").replace(NAMED, "small.toml")
    return [line for line in small.splitlines() if line.strip()]


def shell(tree, command):
    if "init_datasets.sh" in command:
        command += f" --max-seq-length {POSITIONS} --max-predictions 2 --dupe-factor 2"
        command = f"ONLY=eval {command} --pick-eval 100 && ONLY=train {command}"
    environ = {"PYTHON": sys.executable, "DOCKER": "./docker", "CLEAR_CACHES": "0"}
    line = f"cd {tree} && {command}"
    return run_process("bash", "-euo", "pipefail", "-c", line, **environ)


@pytest.mark.longest
@pytest.mark.timeout(600)
def test_from_a_checkpoint_of_tensorflow_to_what_package_says(tree):
    *steps, launch, package = commands()
    assert ["convert" in steps[0], "init_datasets" in steps[1], len(steps)] == [True, True, 2]
    said = ""
    for command in steps:
        done = shell(tree, command)
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout
    assert re.search(r"^wrote weights \(sha256 of the weights: \w{64}\)$", said, re.M)

    started = time.monotonic()
    without = shell(tree, launch.replace("INIT_CHECKPOINT=weights", ""))
    assert time.monotonic() - started < 5
    assert without.returncode == 2 and not list((tree / "runs/ten").iterdir())
    assert "run.init_checkpoint: is not set, but the closed division" in without.stderr
    assert without.stderr.count("\n") == 1

    done = shell(tree, launch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("result_0.txt$", done.stdout, re.M)) == 1
    assert (
        len(re.findall(r"^log format accepted by the compliance checker, .*$", done.stdout, re.M))
        == RUNS
    )
    log = tree / "runs/ten/result_0.txt"
    seeds = {mlperf_records(each, "seed")[0]["value"] for each in log.parent.glob("result_?.txt")}
    assert len(seeds) == RUNS
    (weights,) = mlperf_records(log, "initial_weights")
    assert weights["value"] == "checkpoint"

    verdict = shell(tree, package)
    assert verdict.returncode == 1
    _, *problems, last = verdict.stdout.splitlines()
    assert last.startswith("the submission has ")
    assert {why for problem in problems for why in SMALL if why in problem} == set(SMALL)
    others = [problem for problem in problems if not any(why in problem for why in SMALL)]
    assert others == []
