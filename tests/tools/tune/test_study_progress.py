"""What a person sees of a study, when nobody looks any more."""

import os
import sys
from contextlib import suppress

import pytest

from bert_tools.tune.progress import StudyProgress


def test_a_study_goes_on_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    lost = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", lost)
    with StudyProgress(workers=1) as progress:
        progress.line("one")
        progress.line("another")
    with suppress(BrokenPipeError):  # of what it still holds
        lost.close()
