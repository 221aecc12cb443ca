"""`tools/gpu_check.sh`: its settings exist, a part that fails costs itself, a dry run does all.

And `tools/summarise_gpu.py`: goals of the device, how parts and tests ended, in few words.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile

import pytest

from bert_tools.bench import cli
from bert_tools.squad import cli as squad_cli
from bert_tools.squad.settings import parse_engine, settings_of
from mlperf_bert.config.files import load_config
from mlperf_bert.step.captured import READ_LENGTHS_ON_THE_HOST
from support import CONFIGS, REPOSITORY, run_process

SCRIPT = REPOSITORY / "tools" / "gpu_check.sh"
GPU_TESTS = REPOSITORY / "tests" / "gpu"
SUMMARY = REPOSITORY / "tools" / "summarise_gpu.py"
LIMITS = {"1": 260, "2": 520, "3": 420, "4": 380}  # seconds
LEASE = 900  # of which the machine's start takes up to 100
RESULT = {"device": "cuda", "device_name": "NVIDIA H200", "samples_per_s": 1000.0}
# Stands in for PYTHON: it has no mlperf-logging, and measurements take no time.
STUB = """#!/bin/bash
case "$*" in
*summarise_gpu.py* | *zipfile*) exec "$REAL" "$@" ;;
*"-c import mlperf_logging"*) exit 1 ;;
*--profile*bf16*) echo half; kill -9 $$ ;;
*--profile*fp8*) exec sleep "${HANG:-0}" ;;
*"bench train"*fp8*) echo "torch.OutOfMemoryError: CUDA out of memory." >&2; exit 1 ;;
*"size=4 --peak"*) exec sleep 5 ;;
*"bench optimizer"*)
    exec "$REAL" -c 'import json, mlperf_logging; print(json.dumps([mlperf_logging.__file__]))' ;;
*bench*) cat "$RESULT" ;;
esac
"""
# Stands in for `timeout`: every part has a second.
SECOND = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
exec "$TIMEOUT" --kill-after=1 1 "${@:2}"
"""


def listed(*arguments, **environ):
    """Commands of the parts, by the file that they write."""
    done = run_process("bash", SCRIPT, "--list", *arguments, PYTHON=sys.executable, **environ)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return {file: shlex.split(command) for _, file, _, command in lines}


@pytest.mark.parametrize("stage", LIMITS)
def test_limits_of_a_stage_add_up(stage):
    done = run_process("bash", SCRIPT, "--list", stage)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {stage}
    other = {"1": "2", "2": "1", "3": "4", "4": "3"}[stage]  # called right before or after it
    assert sum(int(line[2]) for line in lines) <= LIMITS[stage] <= LEASE - 100 - LIMITS[other]
    assert len({line[1] for line in lines}) == len(lines)


@pytest.mark.parametrize("arguments", [(), ("5",), ("1", "2"), ("--list", "--list"), ("12",)])
def test_a_stage_must_be_named(arguments):
    done = run_process("bash", SCRIPT, *arguments)
    assert done.returncode == 2
    assert "needs a stage" in done.stderr


def test_every_measurement_has_arguments_that_can_be(monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # as the script does
    parts = listed()
    measured = {name: words for name, words in parts.items() if "bench" in words}
    others = {"doctor.txt", "squad.json", "whole_runs.json"}
    others |= {f"text_{precision}.txt" for precision in ("bf16", "fp8")}
    others |= {f"tests_{which}.txt" for which in ("first", "others", "compiled")}
    assert set(parts) - set(measured) == others
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    for name, words in measured.items():
        args = parser.parse_args(words[words.index("bench") + 1 :])
        assert args.json, name
        config = cli.make_config(args)
        assert config.model.num_layers == 24, name
        assert config.parallel.world_size == 1
        if config.run.step_mode == "captured":
            assert config.model.attention not in READ_LENGTHS_ON_THE_HOST, name
            assert config.model.precision != "fp32", name  # whose attention is "grouped"


def test_the_fine_tuning_has_arguments_that_can_be():
    (words,) = listed(ONLY="^squad$").values()
    parser = argparse.ArgumentParser()
    squad_cli.add_arguments(parser)
    args = parser.parse_args(words[words.index("squad") + 1 :])
    assert args.json and args.engines == "single"
    settings = settings_of(args, parse_engine(args.engines), seed=1)
    assert settings.updates == 100 and settings.precision == "bf16"


def test_runs_of_text_have_settings_that_can_be_and_start_alike():
    parts = listed(ONLY="^(text|whole)_")
    settings = {file: [word for word in words[4:] if "=" in word] for file, words in parts.items()}
    for file, given in settings.items():
        config = load_config(CONFIGS / "cpu_tiny.toml", given)
        assert config.parallel.world_size == 1, file
        assert config.run.device == "cuda", file
        assert config.run.step_mode == "captured", file
        assert config.model.precision != "fp32", file  # whose attention is "grouped"
        assert "run.seed=1" in given, file
    assert "run.max_steps=300" in settings["text_bf16.txt"]
    changed = set(settings["text_bf16.txt"]) ^ set(settings["text_fp8.txt"])
    assert changed == {"model.precision=bf16", "model.precision=fp8"}


def test_ablations_differ_from_the_headline_in_their_switch_alone():
    parts = listed("3", ONLY="ablation_")
    alone = parts.pop("ablation_none.json")
    (headline,) = listed("1", ONLY="train_bf16").values()
    assert [word for word in headline if word not in alone] == ["3"]  # seconds of the peak
    assert len(parts) == 5
    for name, words in parts.items():
        added = [word for word in words if "=" in word and word not in alone]
        assert added, name
        assert [word for word in alone if "=" in word and word not in words] == []


def test_every_file_of_gpu_tests_is_run_once_and_the_compiling_one_last():
    parts = listed(ONLY="^tests_")
    assert list(parts) == ["tests_first.txt", "tests_others.txt", "tests_compiled.txt"]
    targets = [word for words in parts.values() for word in words if "tests/gpu" in word]
    files = sorted(target for target in targets if "::" not in target)
    assert files == sorted(f"tests/gpu/{path.name}" for path in GPU_TESTS.glob("test_*.py"))
    apart = [target for target in targets if "::" in target]  # their files run without them
    functions = {target.partition("[")[0] for target in apart}
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    found = run_process(*command, GPU_TESTS, "-o", "addopts=").stdout.split()
    assert functions <= {test.partition("[")[0] for test in found}
    for test in found:
        times = sum(test.startswith(target) for target in apart)
        assert times == (test.partition("[")[0] in functions), test
    texts = [path.read_text("utf-8") for path in GPU_TESTS.glob("test_*.py")]
    assert sum(text.count('compiled="whole"') for text in texts) == 1


def test_a_test_that_hangs_ends_its_process_by_its_limit(tmp_path):
    shutil.copy(GPU_TESTS / "conftest.py", tmp_path)
    here = "@__import__('pytest').fixture(scope='session')\ndef gpu(): pass\n"  # not to be skipped
    hangs = "def test_ends(): pass\ndef test_hangs():\n    __import__('time').sleep(60)\n"
    (tmp_path / "test_one.py").write_text(here + hangs, encoding="utf-8")
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", tmp_path)
    options = {"TEST_LIMIT_S": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_process(*command, "-c", "/dev/null", **options)
    assert done.returncode == 1
    assert "test_ends PASSED" in done.stdout
    assert done.stdout.rstrip().endswith("test_hangs")
    assert "Timeout (0:00:01)!" in done.stderr and "in test_hangs" in done.stderr


def stubbed(directory, **environ):
    """The environment of a run in which PYTHON and `timeout` are stand-ins."""
    for name, text in (("python", STUB), ("timeout", SECOND)):
        (directory / name).write_text(text, encoding="utf-8")
        (directory / name).chmod(0o755)
    (directory / "result.json").write_text(json.dumps(RESULT), encoding="utf-8")
    (directory / "temporary").mkdir()
    return {
        "PYTHON": str(directory / "python"),
        "REAL": sys.executable,
        "TIMEOUT": str(shutil.which("timeout")),
        "RESULT": str(directory / "result.json"),
        "PATH": f"{directory}:{os.environ['PATH']}",
        "TMPDIR": str(directory / "temporary"),
        "OUT": str(directory / "out"),
        "HOME": "/nonexistent",
        "CACHE": str(directory / "cache"),
        "COMMIT": "of another machine",
        **environ,
    }


def archived(out, name):
    with tarfile.open(out / "gpu_check.tar.gz") as archive:
        file = archive.extractfile(f"results/{name}")
        assert file is not None
        return file.read().decode("utf-8")


def test_a_part_that_ends_badly_leaves_the_others(tmp_path):
    done = run_process("bash", SCRIPT, "1", **stubbed(tmp_path))
    assert done.returncode == 1, done.stderr  # parts failed
    words = (tmp_path / "out" / "summary.md").read_text("utf-8")
    assert done.stdout == words
    assert "commit: of another machine" in words
    assert "| train_bf16 | done |" in words
    assert "| train_fp8 | ran out of memory |" in words
    assert "| profile_bf16 | failed (137): " in words
    assert "| train_batch_4_captured | stopped, took too long: " in words
    assert "| train_batch_4_eager | done |" in words
    assert "| bf16 samples/s, first | at least 950 | met: 1000 |" in words
    assert "| FP8 samples/s, first | at least 1092 | not measured |" in words
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 4
    assert json.loads(archived(tmp_path / "out", "train_batch_4_eager.json")) == RESULT
    assert archived(tmp_path / "out", "summary.md") == words
    kept = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert kept == []


def test_want_of_memory_alone_is_no_failure(tmp_path):
    done = run_process("bash", SCRIPT, "1", **stubbed(tmp_path), ONLY="train_(bf16|fp8)")
    assert done.returncode == 0, done.stderr
    assert "| train_fp8 | ran out of memory |" in done.stdout


def test_mlperf_logging_comes_from_a_directory_of_wheels(tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "mlperf_logging-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlperf_logging/__init__.py", "")
    environ = stubbed(tmp_path, WHEELS=str(tmp_path / "wheels"))
    done = run_process("bash", SCRIPT, "3", **environ, ONLY="optimizer")
    assert done.returncode == 0, done.stderr
    assert "/wheels/mlperf_logging/__init__.py" in archived(tmp_path / "out", "optimizer.json")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_check_loses_the_part_under_way_alone(tmp_path, number):
    environ = os.environ | stubbed(tmp_path, HANG="5")
    os.remove(tmp_path / "timeout")  # the real one has more patience
    summary_file = tmp_path / "out" / "summary.md"
    process = subprocess.Popen(["bash", SCRIPT, "1"], env=environ, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not summary_file.exists() or "| profile_bf16 | not" in summary_file.read_text("utf-8"):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=4) == (-number if number == signal.SIGKILL else 128 + number)
    words = summary_file.read_text("utf-8")
    assert "| train_bf16 | done |" in words
    assert "| profile_fp8 | not ended |" in words
    assert json.loads(archived(tmp_path / "out", "train_bf16.json")) == RESULT


def dry_run(out, *arguments, **environ):
    """Commands of the parts that a dry run did, by name; all of them succeeded."""
    options = {"PYTHON": sys.executable, "OUT": str(out), **environ}
    done = run_process("bash", SCRIPT, "--dry-run", *arguments, limit_s=1500, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.tar.gz", "summary.md"]
    words = (out / "summary.md").read_text(encoding="utf-8")
    assert "Not run on a GPU" in words
    plan = [line.split("\t") for line in archived(out, "plan.tsv").splitlines()]
    parts = {file.partition(".")[0]: command.split() for _, file, _, command in plan}
    assert all(f"| {name} | done |" in words for name in parts), words
    assert "whole_runs" not in parts or re.search(r"losses in ([1-9]\d*) of \1 later", words)
    return parts


@pytest.mark.slow
def test_dry_run_of_some_parts_where_nothing_of_ours_is_installed(tmp_path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n'
    )  # -S: no editable install
    python.chmod(0o755)
    names = ("profile_bf16", "tests_compiled", "squad")
    environ = {"PYTHON": str(python), "PYTHONPATH": sysconfig.get_path("purelib")}
    assert tuple(dry_run(out, ONLY=f"^({'|'.join(names)})$", **environ)) == names
    with tarfile.open(out / "gpu_check.tar.gz") as archive:
        assert archive.getmember("results/profile_bf16.json.gz").size > 0


@pytest.mark.longest
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("stage", "forms"),
    [
        ("1", {"train"}),
        ("2", {"train", "against"}),
        ("3", {"train", "optimizer"}),
        ("4", set()),
    ],
)
def test_dry_run_does_every_part(tmp_path, stage, forms):
    commands = dry_run(tmp_path, stage).values()
    assert {words[words.index("bench") + 1] for words in commands if "bench" in words} == forms


TRAIN = {
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "samples_per_s": 1000.0,
    "step_ms": 112.0,
    "tflops": 500.0,
    "mfu": 0.7,
    "padding_share": 0.01,
    "memory_peak_bytes": 2**33,
}


def write_part(out, name, status, result):
    with (out / "plan.tsv").open("a", encoding="utf-8") as file:
        file.write(f"1\t{name}.json\t20\tbench {name}\n")
    with (out / "parts.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{name}\t{status}\t3\n")
    if result is not None:
        (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    (out / f"{name}.log").write_text("progress\nlast words\n", encoding="utf-8")


def summary(out, status=0):
    done = run_process(sys.executable, SUMMARY, out)
    assert done.returncode == status, done.stderr
    return done.stdout


def test_summary_judges_the_goals(tmp_path):
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    write_part(tmp_path, "train_fp8", 0, {**TRAIN, "samples_per_s": 1100.0})
    write_part(tmp_path, "train_batch_4_captured", 0, {**TRAIN, "samples_per_s": 90.0})
    write_part(tmp_path, "train_batch_4_eager", 0, {**TRAIN, "samples_per_s": 50.0})
    write_part(tmp_path, "ablation_none", 0, {**TRAIN, "samples_per_s": 800.0})
    write_part(tmp_path, "ablation_eager", 0, {**TRAIN, "samples_per_s": 720.0, "mfu": None})
    write_part(tmp_path, "against_bf16", 0, {"ratio_strongest": 1.0})
    write_part(tmp_path, "optimizer", 2, None)
    write_part(tmp_path, "doctor", 124, None)
    write_part(tmp_path, "whole_runs", 1, None)
    words = summary(tmp_path, status=1)
    assert "| bf16 samples/s, first | at least 950 | met: 1000 |" in words
    assert "| bf16 samples/s, goal | at least 1030 | missed: 1000 |" in words
    assert "| FP8 samples/s, first | at least 1092 | met: 1100 |" in words
    assert "| FP8 samples/s, goal | at least 1250 | missed: 1100 |" in words
    assert "| captured / eager at 4 sequences | at least 1.5 | met: 1.8 |" in words
    assert "| ablation_eager | 0.900 | 720.0 |" in words
    assert "not summarised: KeyError" in words  # and all others are
    assert "cannot run here: last words" in words
    assert "stopped, took too long: last words" in words
    assert "failed (1): last words" in words


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("NVIDIA H100 80GB HBM3", ["850", "900", "1139", "1200"]),
        ("NVIDIA H200", ["950", "1030", "1092", "1250"]),
        ("NVIDIA GH200 480GB", []),
    ],
)
def test_goals_are_those_of_the_device(tmp_path, name, bounds):
    write_part(tmp_path, "train_bf16", 0, {**TRAIN, "device_name": name})
    lines = summary(tmp_path).splitlines()
    found = [line.split(" | ")[1] for line in lines if "samples/s, " in line]
    assert found == [f"at least {bound}" for bound in bounds]
    assert any("| train_bf16 | 1.000 | 1000.0 |" in line for line in lines)
    assert bounds or any(line.startswith("Not judged") for line in lines)


def test_summary_of_a_cpu_judges_nothing(tmp_path):
    write_part(tmp_path, "train_bf16", 0, {**TRAIN, "device": "cpu"})
    words = summary(tmp_path)
    assert "Not run on a GPU" in words
    assert "met" not in words.split()


def test_summary_compares_runs_of_text(tmp_path):
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    for name, losses in {
        "text_bf16/run_0": {10: 8.0, 20: 6.0},
        "text_fp8/run_0": {10: 8.25, 20: 5.5},
        "whole": {10: 8.0, 20: 7.0, 30: 6.0, 40: 5.0},
        "resumed": {10: 8.0, 15: 7.5, 20: 7.1, 30: 6.0, 40: 5.1},
    }.items():
        (tmp_path / name).mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = summary(tmp_path)
    assert "| 10 | 8.0000 | 8.2500 |" in words
    assert "over 2 logged steps: -0.5000 to +0.2500, mean -0.1250, last -0.5000" in words
    # The record at 20 is the mean of another interval.
    assert "after step 15 and resumed, a run has the whole one's losses in 1 of 2 later" in words
    broken = json.dumps({"step": 20, "loss": None})
    (tmp_path / "text_fp8" / "run_0" / "metrics.jsonl").write_text(broken, encoding="utf-8")
    assert "| 20 | 6.0000 | nan |" in summary(tmp_path)


def test_summary_gives_the_shares_of_a_whole_run(tmp_path):
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    run = tmp_path / "whole"
    run.mkdir()
    steps = [{"step": step, "loss": 1, "step_ms": 10, "wait_ms": 1} for step in (5, 10, 15)]
    steps[2]["step_ms"] = 20  # a record is closed before a checkpoint is begun
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)), encoding="utf-8")
    (run / "config.toml").write_text("[checkpoint]\ninterval_steps = 10\n", encoding="utf-8")
    (run / "stdout.log").write_text("checkpoint step_00000005: is no fact\n", encoding="utf-8")
    times = {"run_start": 0, "eval_start": 100, "eval_stop": 150, "run_stop": 1000}
    events = [json.dumps({"key": key, "time_ms": at}) for key, at in times.items()]
    (run / "result_0.txt").write_text("".join(f":::MLLOG {event}\n" for event in events))
    words = summary(tmp_path)
    assert "Waiting for data: 7.50% of a step" in words
    assert "in the interval after one, a step takes 2.000 times as long" in words
    assert "Evaluations: 5.00% of the run" in words


def test_summary_says_which_tests_failed_and_which_never_ended(tmp_path):
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    ended = "tests/gpu/test_a.py::test_b FAILED\nFAILED tests/gpu/test_a.py::test_b - assert 0\n"
    ended += "========= 1 failed, 2 passed in 1.50s ==========\n"
    (tmp_path / "test_a.txt").write_text(ended, encoding="utf-8")
    hangs = "tests/gpu/test_c.py::test_d PASSED\ntests/gpu/test_c.py::test_e \nTimeout!\n  File"
    (tmp_path / "test_c.txt").write_text(hangs, encoding="utf-8")
    words = summary(tmp_path)
    assert "| test_a | 1 failed, 2 passed in 1.50s |" in words
    assert "- FAILED tests/gpu/test_a.py::test_b - assert 0" in words
    assert "| test_c | cut off in tests/gpu/test_c.py::test_e |" in words


def test_summary_fits_what_is_shown_of_a_run(tmp_path):
    for number in range(300):
        write_part(tmp_path, f"part_{number}_{'long' * 20}", 0, {"rows": ["words"] * 10_000})
    words = summary(tmp_path)
    assert len(words) < 11_000
    assert "cut off: the archive has all" in words
