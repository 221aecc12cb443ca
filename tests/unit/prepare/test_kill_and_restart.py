"""`mlperf_bert prepare` killed at any moment and started again gives the same bytes."""

import os
import signal
import traceback
from functools import partial
from pathlib import Path

from support import contents
from verify_cases import prepare_set, write_text, write_vocabulary


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
