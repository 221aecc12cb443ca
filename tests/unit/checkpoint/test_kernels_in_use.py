"""Ranks that would compute with other kernels do not begin, and a resumed run says what changed."""

from types import SimpleNamespace

import pytest

from mlperf_bert.checkpoint import resume
from mlperf_bert.checkpoint.resume import agree_on_kernels, changed_kernels
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import ConfigError

ALONE = RankInfo(0, 1, 0, 1, 0, "single")
TRITON = ["triton", "attention: triton", "fused"]
FLASH = ["flash", "attention: flash (not triton, because there is no C compiler)", "fused"]


def test_equal_ranks_begin_and_others_are_named_with_the_reason(monkeypatch):
    def agree(*of_ranks):
        """Rank 0 of ranks that have built these models begins."""
        name, note, kernels = of_ranks[0]
        model = SimpleNamespace(attention=SimpleNamespace(name=name, note=note), kernels=kernels)
        monkeypatch.setattr(resume, "from_all_ranks", lambda _, own: [own, *of_ranks[1:]])
        agree_on_kernels(ALONE, model)

    agree(TRITON)
    agree(FLASH, FLASH, FLASH)
    with pytest.raises(ConfigError) as raised:
        agree(TRITON, FLASH, TRITON)
    assert str(raised.value) == (
        "model.attention: differs between ranks ('attention: triton' on rank 0, "
        "'attention: flash (not triton, because there is no C compiler)' on rank 1); "
        "choose a value that all ranks can run, or install the same software on all nodes"
    )
    assert raised.value.is_of_all_ranks
    with pytest.raises(ConfigError, match=r"model\.kernels: .*'fused' on rank 0, 'refe.* rank 1"):
        agree(TRITON, [*TRITON[:2], "reference"])


def test_what_changed_since_a_checkpoint_is_told():
    """Of attention: test_resume.py."""
    before, now = (
        SimpleNamespace(attention="flash", kernels=each) for each in ("fused", "reference")
    )
    (line,) = changed_kernels(before, now)
    assert "model.kernels was 'fused' when this checkpoint was written and is 'refe" in line
    of_before = SimpleNamespace(attention=None, kernels=None)
    assert list(changed_kernels(of_before, now)) == []
