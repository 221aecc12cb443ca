"""`mlperf_bert prepare` killed at any moment and started again gives the same bytes."""

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import pytest

from support import contents, write_synthetic_text
from verify_cases import prepare_set, write_text, write_vocabulary


def command(texts, vocab, out):
    words = [sys.executable, "-m", "mlperf_bert", "prepare", "--text", *texts]
    words += ["--vocab", vocab, "--out", out, "--max-seq-length", 64, "--max-predictions", 10]
    return [str(word) for word in (*words, "--dupe-factor", 40, "--workers", 2)]


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


@pytest.mark.longest
def test_killed_at_one_moment_after_the_other_and_restarted(tmp_path):
    vocab, out = write_vocabulary(tmp_path / "words.txt"), tmp_path / "set"
    texts = [tmp_path / f"part-{number}.txt" for number in range(4)]
    for number, path in enumerate(texts):  # of different sizes: not all shards end at once
        write_synthetic_text(path, num_documents=400 + 250 * number, seed=number)
    moments = {
        "directory made": lambda: (out / "vocab.txt").exists(),
        "in the middle": lambda: any(out.glob("shards/.*.tmp")),
        "one done": lambda: any(out.glob("shards/*.json")),
        "most done": lambda: len(list(out.glob("shards/*.json"))) >= len(texts) - 1,
    }
    for moment, is_time in moments.items():
        for _ in range(5):  # a busy machine may sleep through a short moment
            if kill_when(command(texts, vocab, out), is_time):
                break
            shutil.rmtree(out)
        assert is_time(), moment
        assert not (out / "index" / "dataset.json").exists()
    for directory in (out, tmp_path / "undisturbed"):
        subprocess.run(command(texts, vocab, directory), check=True, capture_output=True)
    assert contents(out) == contents(tmp_path / "undisturbed")


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


def test_killed_before_every_single_rename(tmp_path):
    # One worker, so that one process makes all renames: each completes a file.
    vocab = write_vocabulary(tmp_path / "words.txt")
    texts = [write_text(tmp_path / f"{name}.txt", name) for name in ("a", "b")]
    sets = []
    was_killed = True
    while was_killed:
        out = tmp_path / f"after-{len(sets)}-renames"
        prepare = partial(prepare_set, texts, out, vocab=vocab)
        was_killed = killed_before_rename(len(sets), prepare)
        if was_killed:
            prepare()
        sets.append(contents(out))
    undisturbed = sets.pop()
    assert len(sets) == len(undisturbed)
    assert all(found == undisturbed for found in sets)
