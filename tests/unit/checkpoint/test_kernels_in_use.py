"""Ranks that would compute with other kernels do not begin, and a resumed run says what changed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlperf_bert.checkpoint import resume
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.checkpoint.resume import agree_on_kernels, changed_kernels
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import ConfigError

ALONE = RankInfo(0, 1, 0, 1, 0, "single")
TRITON = ["triton", "attention: triton", "fused"]
FLASH = ["flash", "attention: flash (triton left out (there is no C compiler))", "fused"]
STATE = CheckpointState(
    step=7,
    samples=112,
    seed=1,
    mlm_accuracy=None,
    vocabulary_sha256="ab",
    attention="flash",
    kernels="fused",
)


@pytest.fixture
def agree(monkeypatch):
    """Let this be rank 0 of ranks that have built these models."""

    def run(*of_ranks):
        name, note, kernels = of_ranks[0]
        model = SimpleNamespace(attention=SimpleNamespace(name=name, note=note), kernels=kernels)
        monkeypatch.setattr(resume, "from_all_ranks", lambda _, own: [own, *of_ranks[1:]])
        agree_on_kernels(ALONE, model)

    return run


def test_equal_ranks_begin_and_others_are_named_with_the_reason(agree):
    agree(TRITON)
    agree(FLASH, FLASH, FLASH)
    with pytest.raises(ConfigError) as raised:
        agree(TRITON, FLASH, TRITON)
    assert str(raised.value) == (
        "model.attention: is not the same on all ranks: 'attention: triton' on rank 0, "
        "'attention: flash (triton left out (there is no C compiler))' on rank 1; "
        "set model.attention to one that all ranks can run, or install the same software on all "
        "nodes"
    )
    assert raised.value.is_of_all_ranks
    with pytest.raises(ConfigError, match=r"model\.kernels: .* 'fused' on rank 0, 'refe.* rank 1"):
        agree(TRITON, [*TRITON[:2], "reference"])


def test_what_changed_since_a_checkpoint_is_told():
    assert list(changed_kernels(None, STATE)) == []
    assert list(changed_kernels(STATE, replace(STATE, step=0))) == []
    of_before = replace(STATE, attention=None, kernels=None)
    assert list(changed_kernels(of_before, STATE)) == []
    told = list(changed_kernels(STATE, replace(STATE, attention="triton", kernels="reference")))
    assert [line.partition(":")[0] for line in told] == [
        "model.attention was 'flash' when this checkpoint was written and is 'triton' now",
        "model.kernels was 'fused' when this checkpoint was written and is 'reference' now",
    ]
