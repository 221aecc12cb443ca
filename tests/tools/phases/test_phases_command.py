"""`phases`: one recipe, one command and one run directory, killed anywhere and repeated."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_tools.phases.cli import check_phases, read_recipe
from bert_tools.report.run import PHASES
from bert_tools.report.watch import snapshots_of
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import LATEST, MODEL, resolve
from mlperf_bert.checkpoint.tensors import read_tensors
from mlperf_bert.distributed import spawn
from mlperf_bert.distributed.signal_watch import Ended
from mlperf_bert.run.outcome import RunOutcome
from resume_cases import MISSED
from support import (
    REPOSITORY,
    TINY_CONFIG,
    metrics_losses,
    prepare_small,
    refusal,
    sets_of,
    write_synthetic_text,
)

STOPPED, KILLED = 75, -9
STEPS = (60, 64)
STARTS_WITHIN_S = 120  # on a machine that has other work
COMMON = TINY_CONFIG.replace("max_steps = 20\nseed = 11\n", "").replace("decay_steps = 20\n", "")
PHASES_OF_RECIPE = """
[checkpoint]
interval_steps = 3
keep_last = 99
[[phase]]
name = "short"
data_dir = "short"
[phase.data]
max_seq_length = 16
max_predictions = 3
[phase.parallel]
local_batch_size = 8
[phase.schedule]
decay_steps = 60
[[phase]]
name = "long"
data_dir = "long"
[phase.schedule]
decay_steps = 64
"""
RECIPE = COMMON + PHASES_OF_RECIPE


@pytest.fixture(scope="module")
def place(synthetic_data, tmp_path_factory):
    """A directory with data of two phases, data of other words, and the recipe."""
    place = tmp_path_factory.mktemp("place")
    (place / "long").symlink_to(synthetic_data)
    words = (synthetic_data / "words.txt").read_text().split()
    (place / "words.txt").write_text("\n".join([*words[:5], *words[:4:-1]]) + "\n")
    sizes = {"max_seq_length": 16, "max_predictions": 3, "dupe_factor": 2}
    for name, vocabulary in (("short", synthetic_data / "words.txt"), ("other", "words.txt")):
        for part, documents in (("train", 100), ("eval", 30)):
            text = place / f"{name}_{part}.txt"
            write_synthetic_text(text, documents, documents)
            prepare_small([text], place / vocabulary, place / name / part, **sizes)
    (place / "two.toml").write_text(RECIPE)
    return place


@pytest.fixture(autouse=True)
def at_the_place(place, monkeypatch):
    """Paths of a recipe are relative to the current directory."""
    monkeypatch.chdir(place)


def here(words, _ranks, **_):
    """Train in this process: a rank of its own loads torch each time."""
    return main(words)


def phases(root, *more, recipe="two.toml", ranks=here):
    """The exit status of the command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "run_on_ranks", ranks)
        return main(["phases", str(recipe), "--run-dir", str(root), *more])


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """A run that nothing disturbs, and copies of it: before the second phase, and at its start."""
    root, copies = tmp_path_factory.mktemp("whole") / "run", []

    def copying(words, ranks, **_):
        copies.append(root.with_name(f"copy_{len(copies)}"))
        if (root / "run_0").exists():
            shutil.copytree(root, copies[-1])
        status = here(words, ranks)
        copies.append(root.with_name(f"copy_{len(copies)}"))
        shutil.copytree(root, copies[-1])
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert phases(root, ranks=copying) == MISSED
    return root, copies[1:]


def results(root):
    """Losses of all steps, and weights and moments at the end of both phases."""
    found = {}
    for index in (0, 1):
        saved = resolve(root / f"run_{index}" / "checkpoints")
        for path in (saved / MODEL, *sorted((saved / "optimizer").iterdir())):
            tensors = read_tensors(path).items()
            found |= {(index, path.name, name): each.tolist() for name, each in tensors}
        found[index] = metrics_losses(root, index)
        assert len(found[index]) == STEPS[index]
    return found


def statuses(root):
    return [each["status"] for each in json.loads((root / PHASES).read_text())["phases"]]


def seed_of(root, index=0):
    return json.loads((root / f"run_{index}" / "environment.json").read_text())["seed"]


def test_it_says_what_it_trains_and_what_to_do_next(whole, capsys):
    root, _ = whole
    assert phases(root) == MISSED  # everything is finished
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "phase 1 of 2, 'short': 60 steps, 480 sequences of up to 16 tokens, data short",
        "phase 2 of 2, 'long': 64 steps, 1,024 sequences of up to 32 tokens, data long",
    ]
    assert lines[2].startswith("phase 'short' has already ended after 60 steps, 480 samples, ")
    assert len(lines) == 5 and lines[-1].startswith("phases: target missed, accuracy 0.")
    assert "after 2 phases, 1,504 samples and " in lines[-1]
    assert f"report page {root}. To export the model: " in lines[-1]
    values = json.loads((root / PHASES).read_text())
    assert values.keys() == {"schema_version", "phases"} and values["schema_version"] == 1
    short, long = values["phases"]
    assert (short["name"], short["status"], short["steps"]) == ("short", "finished", 60)
    assert (long["name"], long["status"], long["samples"]) == ("long", "finished", 1024)
    assert long["seconds"] > 0 and 0 <= long["accuracy"] <= 1
    assert seed_of(root, 0) == seed_of(root, 1)  # although the first phase has drawn it
    assert main(["report", "page", str(root)]) == 0
    said = capsys.readouterr().out
    assert "/run_0: finished, no target\n" in said and "/run_1: target missed\n" in said
    states = [(each.name[-5:], each.state) for each in snapshots_of(root)]
    assert states == [("run_0", "ended: finished, no target"), ("run_1", "ended: target missed")]


def test_it_equals_two_commands_by_hand(whole, tmp_path):
    """As on the page docs/concepts/encoder_recipe.md, with a config of one phase."""
    root, _ = whole
    config, seed = tmp_path / "one.toml", f"run.seed={seed_of(root)}"
    config.write_text(COMMON.replace("[schedule]\n", "[schedule]\ndecay_steps = 64\n"))
    words = ["train", "--config", str(config), "--run-dir", str(tmp_path / "run")]
    short = ("data.max_seq_length=16", "data.max_predictions=3", "parallel.local_batch_size=8")
    short += ("schedule.decay_steps=60", "eval.target_accuracy=none", seed)
    assert main([*words, "--data", "short", *sets_of(*short)]) == 0
    words += ["--init-checkpoint", str(tmp_path / "run/run_0/checkpoints"), "--run-index", "1"]
    words += ["--data", "long", *sets_of("run.init_state=training", seed)]
    assert main(words) == MISSED
    assert results(tmp_path / "run") == results(root)


def test_killed_between_phases_it_goes_on_bit_for_bit(whole, tmp_path, capsys):
    """Even without the data of the phase that has ended."""
    root, (ended, between, _) = whole
    recipe = tmp_path / "two.toml"
    recipe.write_text(RECIPE.replace('data_dir = "short"', 'data_dir = "deleted"'))
    for copy in (ended, between):
        assert statuses(copy) == [["running", "waiting"], ["finished", "running"]][copy is between]
        look = snapshots_of(copy)
        assert [each.has_ended for each in look] == [True, False]  # so `watch` does not end
        assert look[1].state == "no run has started here yet"
        capsys.readouterr()
        assert phases(copy, recipe=recipe) == MISSED
        assert "phase 'short' has already ended after 60 steps" in capsys.readouterr().out
        assert results(copy) == results(root) and statuses(copy) == ["finished"] * 2


def until_saved(words, root, index, number):
    """Start the command, send it a signal after its first checkpoint; its status and output."""
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True) as started:
        saved, deadline = root / f"run_{index}" / "checkpoints", time.monotonic() + STARTS_WITHIN_S
        before = len(list(saved.glob("step_*")))
        while not ((saved / LATEST).exists() and len(list(saved.glob("step_*"))) > before):
            assert started.poll() is None and time.monotonic() < deadline, started.stdout.read()
            time.sleep(0.001)
        started.send_signal(number)
        printed, _ = started.communicate(timeout=STARTS_WITHIN_S)
    assert not (root / "run_1" / "outcome.json").exists()
    return started.returncode, printed


def test_stopped_and_killed_in_each_phase_it_goes_on_bit_for_bit(whole, tmp_path):
    """With ranks of its own: Ctrl-C and SIGKILL in the first phase, and SIGKILL in the second."""
    root, seed = tmp_path / "run", f"run.seed={seed_of(whole[0])}"
    words = ["-P", "-m", "mlperf_bert", "phases", "two.toml", "--run-dir", str(root)]
    words = [sys.executable, *words, "--set", seed]
    status, printed = until_saved(words, root, 0, signal.SIGINT)
    assert status == STOPPED and statuses(root) == ["stopped", "waiting"], printed
    typed = rf"^to resume: \S+ phases two.toml --run-dir {root} --set {seed}$"
    assert re.search(typed, printed, re.MULTILINE), printed
    assert until_saved(words, root, 0, signal.SIGKILL)[0] == KILLED
    assert not (root / "run_0" / "outcome.json").exists()
    assert statuses(root) == ["running", "waiting"]
    assert until_saved(words, root, 1, signal.SIGKILL)[0] == KILLED
    assert statuses(root) == ["finished", "running"]
    assert phases(root, "--set", seed) == MISSED
    assert results(root) == results(whole[0]) and statuses(root) == ["finished"] * 2


def outcome(root, index, **values):
    """Let a phase end without training."""
    usual = {"status": "success", "steps": STEPS[index], "samples": 240, "seconds": 1.0}
    ended = RunOutcome(**{**usual, "mlm_accuracy": None, "stopped_by": None, **values})
    (root / f"run_{index}").mkdir(parents=True)
    (root / f"run_{index}" / "outcome.json").write_bytes(ended.to_json())


@pytest.mark.parametrize(
    ("how", "status", "said", "states"),
    [
        ("signal at the last step", STOPPED, "stopped after phase 'short'. To go on: ", "waiting"),
        ("signal between phases", STOPPED, "to go on: ", "waiting"),
        ("diverged", MISSED, "phase 'short' ended before its last step, so no phase", "waiting"),
        ("refused", 2, "", "waiting"),
    ],
)
def test_no_phase_follows_one_that_did_not_end(tmp_path, capsys, how, status, said, states):
    root = tmp_path / "run"

    def ranks(words, _ranks, *, signals, **_):
        assert words[words.index("--run-index") + 1] == "0", "the second phase was started"
        if how == "refused":
            return 2
        outcome(root, 0, **({"status": "aborted", "steps": 9} if how == "diverged" else {}))
        if how == "signal between phases":
            raise Ended("SIGTERM")
        signals.first = signal.SIGTERM if how != "diverged" else 0
        return MISSED if how == "diverged" else 0

    assert phases(root, ranks=ranks) == status
    assert said in capsys.readouterr().err
    first = {"diverged": "failed", "refused": "waiting"}.get(how, "finished")
    assert statuses(root) == [first, states]


LAST = '[[phase]]\nname = "long"\ndata_dir = "long"\n'
OF_LONG = "[phase.schedule]\ndecay_steps = 64\n"
REFUSED = [  # a part of the recipe, its replacement, and the error
    (PHASES_OF_RECIPE, "decay_steps = 9", "two.toml: has no [[phase]] tables; add a [[phase]]"),
    ("[[phase]]", "[phase]", "two.toml: is not valid TOML"),
    ('name = "long"\n', "", 'table 2 has no name; add a line such as name = "short"'),
    ('name = "long"', 'name = "short"', "two phases are named 'short'; rename one of them"),
    ('data_dir = "long"', "", "phase 'long': two.toml: data_dir: is missing; add a line such as"),
    ('data_dir = "long"', 'data = "long"', "phase 'long': two.toml: data_dir: is missing; add a"),
    ('data_dir = "long"', 'data_dir = "~nobody_at_all/a"', "phase 'long': ~nobody_at_all/a/train"),
    ('data_dir = "long"', 'data_dir = "nowhere"', "phase 'long': nowhere/train/index/dataset.json"),
    ('data_dir = "long"', 'data_dir = "other"', "data_dir: other was prepared with another vocab"),
    (OF_LONG, "[phase.schedule]\ndecay_step = 3\n", "'schedule.decay_step'; did you mean schedule"),
    (OF_LONG, "", "phase 'long': two.toml: schedule.decay_steps is missing; add it below [sched"),
    (LAST, f"{LAST}max_seq_length = 9\n", "'max_seq_length'; did you mean data.max_seq_length?"),
    (OF_LONG, "schedule = 3\n", "phase 'long': two.toml: schedule is not a table; write it as"),
    (LAST, f"{LAST}[phase.run]\nseed = 1\n", "run.seed: is set in a phase, but is the same in all"),
    (LAST, f"{LAST}[phase.run]\ninit_checkpoint = 'a'\n", "run.init_checkpoint: is set in a phase"),
    (LAST, f"{LAST}[phase.data]\nmax_seq_length = 16\n", "16 is too small for the data in long/"),
    (
        LAST,
        f"{LAST}[phase.data]\nmax_seq_length = 64\n",
        "phase 'long': data.max_seq_length: 64 ex",
    ),
    (
        LAST,
        f"{LAST}[phase.parallel]\nlocal_batch_size = 9999\n",
        "phase 'long': data_dir: long has",
    ),
    (LAST, f'{LAST}[phase.optim]\nname = "lamb"\n', "optim.name: is 'lamb', but phase 'short' has"),
    (LAST, f"{LAST}[phase.model]\nhidden_size = 16\n", "is 16, but the weights of phase 'short' h"),
    (LAST, f'{LAST}[phase.model]\nobjective = "mlm"\n', "model.objective: is 'mlm', but phase 'sh"),
    (LAST, f"{LAST}[phase.data]\nskip_samples = 16\n", "is 16, but phase 'short' has other data;"),
    (
        "interval_steps = 3",
        'interval_steps = "never"',
        "phase 'short': checkpoint.interval_steps: ",
    ),
    ("[run]\n", '[run]\ninit_state = "training"\n', "phase 'short': run.init_state: is 'training'"),
    ("[run]\n", "[run]\ninit_checkpoint = 'none'\n", "phase 'short': none: "),
    ("[parallel]\n", "[parallel]\nnodes = 2\n", "phase 'short': parallel.nodes: does not work w"),
    (
        "[data]\n",
        '[data]\nloader = "mpi_readers"\n',
        "data.loader: does not work with `phases`, on o",
    ),
]


@pytest.mark.parametrize(("part", "replaced", "said"), REFUSED)
def test_a_recipe_is_checked_before_its_first_phase(place, tmp_path, capsys, part, replaced, said):
    (tmp_path / "two.toml").write_text(RECIPE.replace(part, replaced, 1))
    assert part in RECIPE
    root = tmp_path / "run"
    line = refusal(capsys, "phases", tmp_path / "two.toml", "--run-dir", root)
    assert said in line.replace(f"{tmp_path}/", "")
    assert not root.exists()


def test_options_are_checked_too(tmp_path, capsys, monkeypatch):
    words = ("phases", "two.toml", "--run-dir", tmp_path / "run")
    assert "did you mean run.seed?" in refusal(capsys, *words, "--set", "run.sed=1")
    line = refusal(capsys, *words, "--init-checkpoint", "nowhere")
    assert "phase 'short': nowhere: no such directory" in line
    assert "missing.toml: " in refusal(capsys, "phases", "missing.toml", *words[2:])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "was started once per rank; start the command once" in refusal(capsys, *words)


def test_what_a_phase_may_change(place, tmp_path, monkeypatch):
    """The rate, and with weights only the optimizer too; `--set` goes before the phase's own."""
    own = '[phase.run]\ninit_state = "weights"\n[phase.optim]\nname = "lamb"\n'
    recipe = tmp_path / "two.toml"
    recipe.write_text(RECIPE.replace(LAST, LAST.replace('r = "long"', 'r = "~/long"') + own))
    monkeypatch.setenv("HOME", str(place))
    read = read_recipe(recipe, ["schedule.decay_steps=7"], Path("first"), tmp_path / "run")
    short, long = (each.config for each in read)
    assert (short.run.init_checkpoint, long.run.init_checkpoint) == ("first", "")
    assert (short.eval.target, long.eval.target) == (None, 0.99)
    assert (short.max_steps, long.max_steps, long.run.init_state) == (7, 7, "weights")
    check_phases(read_recipe(recipe, [], None, tmp_path / "run"))


@pytest.mark.parametrize(
    ("batch", "own", "is_said"),
    [
        (8, "", True),
        (4, "", True),  # because the order of "uniform" does not depend on the batch
        (4, 'sampler = "quantile"', False),
        (8, "skip_samples = 480", False),
    ],
)
def test_a_phase_that_repeats_the_samples_of_an_earlier_one_is_named(
    tmp_path, capsys, batch, own, is_said
):
    again = RECIPE.replace('data_dir = "long"', 'data_dir = "./short/"')
    again += f"[phase.parallel]\nlocal_batch_size = {batch}\n[phase.data]\n{own}\n"
    (tmp_path / "again.toml").write_text(again)
    check_phases(read_recipe(tmp_path / "again.toml", [], None, tmp_path / "run"))
    said = "warning: phase 'long' draws the same samples as phase 'short'; set data.skip_"
    assert (said in "".join(capsys.readouterr())) == is_said


CHANGED = [
    ("decay_steps = 60", "decay_steps = 61", "'short': run.max_steps: is 61, but the phase in"),
    ("learning_rate = 3e-3", "learning_rate = 4e-3", "'short': optim.learning_rate: is 0.004, but"),
    ('data_dir = "short"', 'data_dir = "other"', "was not trained on the data in other; pass the"),
    ("local_batch_size = 8", "local_batch_size = 4", "gives a global batch of 4, but the checkp"),
    (LAST, f"{LAST}[phase.run]\ninit_state = 'weights'\n", "'long': run.init_state: is 'weights'"),
    ("[run]\n", "[run]\nseed = 5\n", "'short': run.seed: is 5, but the run to resume has"),
    (f"{LAST}{OF_LONG}", "", "run_1: exists, but the recipe has only 1 phases; undo this"),
]


@pytest.mark.parametrize(("part", "replaced", "said"), CHANGED)
def test_a_phase_that_has_trained_keeps_its_settings(whole, tmp_path, capsys, part, replaced, said):
    (tmp_path / "two.toml").write_text(RECIPE.replace(part, replaced, 1))
    line = refusal(capsys, "phases", tmp_path / "two.toml", "--run-dir", whole[0])
    assert said in line and ("--run-dir NEW" in line or "seed" in said)


def test_a_damaged_record_does_not_keep_anyone_from_watching(tmp_path):
    root = tmp_path / "run"
    outcome(root, 0)
    for text in ("[]", "{", '{"phases": 1}', '{"phases": [1]}', '{"phases": [{}]}'):
        (root / PHASES).write_text(text)
        assert [each.has_ended for each in snapshots_of(root)] == [True]


def test_the_page_shows_a_recipe_that_trains(place, tmp_path, monkeypatch):
    """As it stands there, except for the sizes of the data, the model and the training."""
    page = (REPOSITORY / "docs/concepts/encoder_recipe.md").read_text(encoding="utf-8")
    (text,) = [each for each in re.findall(r"```toml\n(.*?)```", page, re.S) if "[[phase]]" in each]
    (tmp_path / "recipe.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(place)
    reduced = ("model.vocab_size=69", "model.hidden_size=32", "model.intermediate_size=64")
    reduced += (
        "parallel.grad_accum_steps=1",
        "run.max_steps=3",
        "run.device=cpu",
        "parallel.ranks_per_node=1",
    )
    assert phases("runs/phases", *sets_of(*reduced), recipe="recipe.toml") == 0
    assert statuses(Path("runs/phases")) == ["finished"] * 2
    assert "mlperf_bert phases recipe.toml --run-dir runs/phases" in page
