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
LEASE = 900  # seconds, of which the machine's start takes up to 100
COMMAND = 600  # seconds, of one command on it
RESULT = {
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "samples_per_s": 1000.0,
    "step_ms": 112.0,
    "tflops": 500.0,
    "mfu": None,
    "padding_share": 0.01,
    "memory_peak_bytes": 2**33,
    "loss": 10.25,
}
# Stands in for PYTHON: it has no mlperf-logging, and measurements take no time.
STUB = """#!/bin/bash
case "$*" in
*summarise_gpu.py* | *zipfile*) exec "$REAL" "$@" ;;
*"-c import mlperf_logging"*) exit 1 ;;
*--profile*bf16*) echo half; kill -9 $$ ;;
*--profile*fp8*) exec sleep "${HANG:-0}" ;;
*"bench train"*fp8*) echo "torch.OutOfMemoryError: CUDA out of memory." >&2; exit 1 ;;
*"size=4 --peak"*) exec sleep "${HANG:-5}" ;;
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


def plan_of(*stage):
    """The lines of --list: stage, file, seconds at most and command of each part."""
    done = run_process("bash", SCRIPT, "--list", *stage, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_stages_fit_into_a_stay_and_parts_into_a_stage():
    text = SCRIPT.read_text("utf-8")
    found = re.search(r"^LONGEST_S=\(0 (\d+) (\d+) (\d+) (\d+)\)", text, re.MULTILINE)
    longest = [int(each) for each in found.groups()]
    assert f"[{longest[0]}, {longest[1]}, {longest[2]} and {longest[3]}]" in text
    assert max(longest) <= COMMAND
    assert max(sum(longest[:2]), sum(longest[2:])) <= LEASE - 100
    for stage, file, limit, _ in plan_of():
        assert int(limit) <= longest[int(stage) - 1], file


def test_help_is_the_top_of_the_file():
    for option in ("-h", "--help"):
        done = run_process("bash", SCRIPT, option)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Run the measurements, ") and "\n  OUT   " in done.stdout
        assert done.stdout.endswith(" the names of the parts to run\n")


def test_a_stage_must_be_named():
    for arguments in ((), ("5",), ("1", "2"), ("12",)):
        done = run_process("bash", SCRIPT, *arguments)
        assert done.returncode == 2 and "STAGE: missing or unknown" in done.stderr


@pytest.fixture(scope="module")
def parts():
    """Commands of all parts, by name."""
    lines = plan_of()
    found = {file.partition(".")[0]: shlex.split(command) for _, file, _, command in lines}
    assert len(found) == len(lines)
    return found


def test_every_part_has_arguments_that_can_be(parts, monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # as the script does
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    configs = {}
    for name, words in parts.items():
        if "bench" in words:
            args = parser.parse_args(words[words.index("bench") + 1 :])
            configs[name] = cli.make_config(args)
            layers = 22 if name == "modern_bf16" else 24
            assert args.json and configs[name].model.num_layers == layers, name
    for name in ("text_bf16", "text_fp8", "whole_runs"):
        settings = [word for word in parts[name][4:] if "=" in word]
        config = "cpu_tiny" if name == "whole_runs" else "encoder_cpu_tiny"
        configs[name] = load_config(CONFIGS / f"{config}.toml", settings)
        assert configs[name].run.device == "cuda" and configs[name].run.step_mode == "captured"
    for name, config in configs.items():
        assert config.parallel.world_size == 1, name
        assert name == "whole_runs" or config.run.seed == 1, name  # which has SEED
        if config.run.step_mode == "captured":
            assert config.model.attention not in READ_LENGTHS_ON_THE_HOST, name
            assert config.model.precision != "fp32", name  # whose attention is "grouped"
    parser = argparse.ArgumentParser()
    squad_cli.add_arguments(parser)
    args = parser.parse_args(parts["squad"][parts["squad"].index("squad") + 1 :])
    settings = settings_of(args, parse_engine(args.engines), seed=1)
    assert settings.updates == 100 and settings.precision == "bf16"


def test_what_is_compared_differs_in_its_switch_alone(parts):
    alone = parts["ablation_none"]
    assert [word for word in parts["train_bf16"] if word not in alone] == ["3"]  # s of the peak
    for name in parts:
        if name.startswith("ablation_"):
            assert [word for word in alone if "=" in word and word not in parts[name]] == []
    changed = set(parts["text_bf16"]) ^ set(parts["text_fp8"])
    assert changed == {*("text_bf16", "text_fp8"), *("model.precision=bf16", "model.precision=fp8")}


def test_every_file_of_gpu_tests_is_run_once(parts):
    runs = [words for name, words in parts.items() if name.startswith("tests_")]
    targets = [word for words in runs for word in words if "tests/gpu" in word]
    paths = {f"tests/gpu/{path.name}": path for path in GPU_TESTS.glob("test_*.py")}
    assert sorted(target for target in targets if "::" not in target) == sorted(paths)
    for target in targets:
        path, _, test = target.partition("::")
        assert not test or f"def {test.partition('[')[0]}(" in paths[path].read_text("utf-8")


def test_tests_that_run_by_their_ids_are_all_those_there_are(parts, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    targets = [word for words in parts.values() for word in words if word.endswith("]")]
    assert len(targets) == len(set(targets))
    functions = {target.partition("[")[0] for target in targets}
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "--collect-only", "-q")
    done = run_process(sys.executable, "-m", "pytest", *options, *functions)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line for line in done.stdout.splitlines() if "::" in line}
    in_file = {each for each in collected if "test_kernels_are_reference" in each}  # but for one
    assert set(targets) & in_file == {target for target in targets if "are_reference" in target}
    assert set(targets) - in_file == collected - in_file


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
        "HOME": str(directory / "no home"),
        "CACHE": str(directory / "cache"),
        "COMMIT": "of another machine",
        **environ,
    }


def archived(out, name):
    with tarfile.open(out / "gpu_check.tar.gz") as archive:
        return archive.extractfile(f"results/{name}").read().decode("utf-8")


def test_a_part_that_ends_badly_leaves_the_others(tmp_path):
    done = run_process("bash", SCRIPT, "1", **stubbed(tmp_path))
    assert done.returncode == 1, done.stderr  # parts failed
    out = tmp_path / "out"
    assert done.stdout == (out / "summary.md").read_text("utf-8")
    for line in (
        "commit: of another machine",
        "| train_bf16 | done |",
        "| tests_probe | done |",
        "| train_fp8 | ran out of memory |",
        "| profile_bf16 | failed (exit status 137): ",
        "| train_batch_4_captured | stopped because it took too long: ",
        "| train_batch_4_eager | done |",
        "| bf16 samples/s, first milestone | at least 950 | met: 1000 |",
        "| fp8 samples/s, first milestone | at least 1092 | not measured |",
    ):
        assert line in done.stdout
    assert json.loads(archived(out, "train_batch_4_eager.json")) == RESULT
    assert archived(out, "summary.md") == done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.tar.gz", "summary.md"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_want_of_memory_alone_is_no_failure_and_wheels_are_found(tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "mlperf_logging-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlperf_logging/__init__.py", "")
    environ = stubbed(tmp_path, WHEELS=str(tmp_path / "wheels"))
    done = run_process("bash", SCRIPT, "1", **environ, ONLY="train_(bf16|fp8)")
    assert done.returncode == 0 and "| train_fp8 | ran out of memory |" in done.stdout
    done = run_process("bash", SCRIPT, "3", **environ, ONLY="optimizer")
    assert done.returncode == 0, done.stderr
    assert "/wheels/mlperf_logging/__init__.py" in archived(tmp_path / "out", "optimizer.json")


def test_a_stage_ends_in_time(tmp_path):
    environ = stubbed(tmp_path, HANG="60", STAGE_S="7", ONLY="profile|batch_4")
    os.remove(tmp_path / "timeout")  # the real one, which takes the seconds that are left
    begin = time.monotonic()
    done = run_process("bash", SCRIPT, "1", **environ)
    assert done.returncode == 1 and time.monotonic() - begin < 20
    over = "stopped because the time of its stage was over: "
    for name, reason in (("train_batch_4_captured", ""), ("train_batch_4_eager", "not started")):
        assert f"| {name} | {over}{reason} | " in done.stdout


def test_killing_the_check_loses_the_part_under_way_alone(tmp_path):
    environ = os.environ | stubbed(tmp_path, HANG="5")
    os.remove(tmp_path / "timeout")  # the real one has more patience
    summary_file = tmp_path / "out" / "summary.md"
    process = subprocess.Popen(["bash", SCRIPT, "1"], env=environ, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not summary_file.exists() or "| profile_bf16 | not" in summary_file.read_text("utf-8"):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    assert process.wait(timeout=4) == -signal.SIGKILL
    words = summary_file.read_text("utf-8")
    assert "| train_bf16 | done |" in words
    assert "| profile_fp8 | not finished |" in words
    assert json.loads(archived(tmp_path / "out", "train_bf16.json")) == RESULT


@pytest.mark.longest
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("stage", ["1", "2", "3", "4"])
def test_dry_run_does_every_part_where_nothing_of_ours_is_installed(tmp_path, stage):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    options = {"PYTHONPATH": sysconfig.get_path("purelib"), "PYTHON": str(python), "OUT": str(out)}
    done = run_process("bash", SCRIPT, "--dry-run", stage, limit_s=1500, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    words = (out / "summary.md").read_text(encoding="utf-8")
    assert "did not run on a GPU" in words
    for line in archived(out, "plan.tsv").splitlines():
        assert f"| {line.split()[1].partition('.')[0]} | done |" in words
    assert stage != "2" or re.search(r"loss .* in ([1-9]\d*) of \1 later", words)


PARTS = {  # their status and result
    "train_bf16": (0, RESULT),
    "train_fp8": (0, RESULT | {"samples_per_s": 1100.0}),
    "train_batch_4_captured": (0, RESULT | {"samples_per_s": 90.0, "loss": None}),
    "train_batch_4_eager": (0, RESULT | {"samples_per_s": 50.0}),
    "ablation_none": (0, RESULT | {"samples_per_s": 800.0}),
    "ablation_eager": (0, RESULT | {"samples_per_s": 720.0}),
    "transformers_bf16": (0, {"ratio_strongest": 1.0}),
    "optimizer": (2, None),
}
LOSSES = {
    "text_bf16/run_0": {10: 8.0, 20: 6.0},
    "text_fp8/run_0": {10: 8.25, 20: 5.5},
    "whole": {10: 8.0, 20: 7.0, 30: 6.0, 40: 5.0},
    "resumed": {10: 8.0, 15: 7.5, 20: 7.1, 30: 6.0, 40: 5.1},  # at 20 of another interval
}
ENDED = """tests/gpu/test_a.py::test_b FAILED
FAILED tests/gpu/test_a.py::test_b - assert 0
========= 1 failed, 2 passed in 1.50s ==========
"""
HANGS = "tests/gpu/test_c.py::test_d PASSED\ntests/gpu/test_c.py::test_e \nTimeout!\n  File"


def summary(out, parts, status=0):
    """What is said of these parts beside the files that are there."""
    plan, ends = "", ""
    for name, (ended, result) in parts.items():
        plan += f"1\t{name}.json\t20\tbench {name}\n"
        ends += f"{name}\t{ended}\t3\t99\n"
        if result is not None:
            (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
        (out / f"{name}.log").write_text("progress\nlast words\n", encoding="utf-8")
    (out / "plan.tsv").write_text(plan, encoding="utf-8")
    (out / "parts.tsv").write_text(ends, encoding="utf-8")
    done = run_process(sys.executable, SUMMARY, out)
    assert done.returncode == status, done.stderr
    return done.stdout


def test_summary_of_a_whole_check(tmp_path, snapshot):
    for name, losses in LOSSES.items():
        (tmp_path / name).mkdir(parents=True)
        times = {"step_ms": 10, "data_wait_ms": 1}
        records = [{"step": step, "loss": loss, **times} for step, loss in losses.items()]
        if name == "whole":
            # A record is closed before a checkpoint is begun.
            records[3] |= {"step_ms": 20, "data_wait_ms": 2}
        text = "\n".join(map(json.dumps, records))
        (tmp_path / name / "metrics.jsonl").write_text(text, encoding="utf-8")
    run = tmp_path / "whole"
    (run / "config.toml").write_text("[checkpoint]\ninterval_steps = 30\n", encoding="utf-8")
    (run / "stdout.log").write_text("checkpoint step_00000005: is no fact\n", encoding="utf-8")
    times = {"run_start": 0, "eval_start": 100, "eval_stop": 150, "run_stop": 1000}
    events = [json.dumps({"key": key, "time_ms": at}) for key, at in times.items()]
    (run / "result_0.txt").write_text("".join(f":::MLLOG {event}\n" for event in events))
    (tmp_path / "test_a.txt").write_text(ENDED, encoding="utf-8")
    (tmp_path / "test_c.txt").write_text(HANGS, encoding="utf-8")
    assert summary(tmp_path, PARTS, status=1) == snapshot
    broken = json.dumps({"step": 20, "loss": None})
    (tmp_path / "text_fp8" / "run_0" / "metrics.jsonl").write_text(broken, encoding="utf-8")
    assert "| 20 | 6.0000 | nan |" in summary(tmp_path, PARTS, status=1)


def test_goals_are_those_of_the_device(tmp_path):
    for named, goal in (
        ({"device_name": "NVIDIA H100 80GB HBM3"}, "| bf16 samples/s, goal | at least 1020 |"),
        ({"device_name": "NVIDIA GH200 480GB"}, "There are no goals for this GPU"),
        ({"device": "cpu"}, "did not run on a GPU"),
    ):
        words = summary(tmp_path, {"train_bf16": (0, RESULT | named)})
        assert goal in words and ("samples/s, " in words) == ("H100" in str(named))
    many = {f"part_{number}_{'long' * 20}": (0, {}) for number in range(300)}
    words = summary(tmp_path, many)
    assert len(words) < 11_000 and "(truncated here, complete in the archive)" in words
