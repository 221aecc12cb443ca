"""`mlperf_bert prepare` killed at any moment and started again gives the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import pytest

from support import contents, prepare_small, write_synthetic_text

NUM_TEXTS = 4

# Runs the command line, and says when a pass over a text of more than two documents begins.
WITH_PASSES_ANNOUNCED = """
import runpy
from mlperf_bert.prepare import examples
add_pass = examples.add_pass
def announced(work, found, count):
    if len(work.order) > 2:
        print("pass", flush=True)
    return add_pass(work, found, count)
examples.add_pass = announced
runpy.run_module("mlperf_bert", run_name="__main__", alter_sys=True)
"""


def command(texts, vocab, out):
    options = {"max-seq-length": 64, "max-predictions": 10, "dupe-factor": 40, "workers": 2}
    words = [sys.executable, "-m", "mlperf_bert", "prepare", "--text", *texts]
    words += ["--vocab", vocab, "--out", out]
    for name, value in options.items():
        words += [f"--{name}", value]
    return [str(word) for word in words]


def finished_shards(out):
    return len(list(out.glob("shards/*.json")))


def kill_when(words, is_time):
    """Kill the command's whole process group while `is_time()`; False where it ended before."""
    process = subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        if is_time():
            # Frozen first: what was true may have passed before the signal arrived.
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(0.02)
            if is_time():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return True
            os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.0005)
    return False


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of different sizes, so that their shards do not all end at once."""
    directory = tmp_path_factory.mktemp("texts")
    paths = [directory / f"part-{number}.txt" for number in range(NUM_TEXTS)]
    for number, path in enumerate(paths):
        write_synthetic_text(path, num_documents=400 + 250 * number, seed=number)
    return paths


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = random.Random(1).sample(range(64), 50)  # some words are unknown
    path.write_text("\n".join([*special, *(f"w{word}" for word in words)]) + "\n")
    return path


@pytest.fixture(scope="module")
def undisturbed(texts, vocab, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "set"
    subprocess.run(command(texts, vocab, out), check=True, capture_output=True)
    return contents(out)


def test_killed_at_one_moment_after_the_other_and_restarted(texts, vocab, undisturbed, tmp_path):
    out = tmp_path / "set"
    moments = {
        "directory made": lambda: (out / "vocab.txt").exists(),
        "in the middle": lambda: any(out.glob("shards/.*.tmp")),
        "one done": lambda: finished_shards(out) >= 1,
        "most done": lambda: finished_shards(out) >= NUM_TEXTS - 1,
    }
    for moment, is_time in moments.items():
        for _ in range(5):  # a busy machine may sleep through a short moment
            if kill_when(command(texts, vocab, out), is_time):
                break
            shutil.rmtree(out)
        assert is_time(), moment
        assert contents(out) != undisturbed
    subprocess.run(command(texts, vocab, out), check=True, capture_output=True)
    assert contents(out) == undisturbed


def killed_before_rename(number, prepare):
    """Prepare in a process that is killed instead of making that rename; whether it came to it."""
    child = os.fork()
    if child == 0:
        renames = [lambda self, target: os.kill(os.getpid(), signal.SIGKILL)]
        renames += [Path.replace] * number

        def replace(self, target):
            return renames.pop()(self, target)

        try:
            Path.replace = replace
            prepare()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_killed_before_every_single_rename(texts, vocab, tmp_path):
    # One worker, so that one process makes all renames: each completes a file.
    sizes = {"max_seq_length": 64, "max_predictions": 10, "dupe_factor": 1}
    sets = []
    was_killed = True
    while was_killed:
        out = tmp_path / f"after-{len(sets)}-renames"
        prepare = partial(prepare_small, texts[:2], vocab, out, **sizes)
        was_killed = killed_before_rename(len(sets), prepare)
        if was_killed:
            prepare()
        sets.append(contents(out))
    undisturbed = sets.pop()
    assert len(sets) == len(undisturbed)
    assert all(found == undisturbed for found in sets)


def test_interrupted_in_compiled_code_and_restarted(vocab, tmp_path):
    text, out = tmp_path / "long.txt", tmp_path / "set"
    write_synthetic_text(text, num_documents=20_000, seed=1)  # a pass takes a while
    words = [*command([text], vocab, out)[3:], "--workers", "1", "--dupe-factor", "20"]
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_PASSES_ANNOUNCED, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job may have started these tests with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "pass\n"
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (130, "", "mlperf_bert: interrupted\n")
    assert contents(out).keys() == {"vocab.txt"}
    for directory in (out, tmp_path / "undisturbed"):
        again = [word if word != str(out) else str(directory) for word in words]
        subprocess.run([sys.executable, "-m", "mlperf_bert", *again], check=True)
    assert contents(out) == contents(tmp_path / "undisturbed")
