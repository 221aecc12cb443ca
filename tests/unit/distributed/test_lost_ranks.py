"""What gloo says of ranks that are gone becomes one line; other errors stay what they are."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from mlperf_bert.distributed.launch import host_name
from mlperf_bert.distributed.lost_ranks import as_lost_ranks

HERE = "rank 3 on n2, step 37"
PATIENCE = timedelta(seconds=20)
# As torch 2.13 raises them, in one line each.
CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
SILENT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation"
AFTER = "Application timeout caused pair closure"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CLOSED, "another rank closed the connection"),
        (SILENT, "no answer from other ranks within 20 s (run.hang_timeout_s)"),
        (AFTER, "no answer from other ranks within 20 s (run.hang_timeout_s)"),
    ],
)
def test_communication_is_told_by_its_words(text: str, problem: str) -> None:
    error = as_lost_ranks(RuntimeError(text), HERE, PATIENCE)
    assert error is not None
    assert error.exit_status == 70
    assert str(error).startswith(f"{HERE}: {problem}; ")


def test_other_errors_are_left() -> None:
    assert as_lost_ranks(RuntimeError("shapes differ; timed out"), HERE, PATIENCE) is None
    taken = dist.DistNetworkError("The server socket has failed to listen: address already in use")
    assert as_lost_ranks(taken, HERE, PATIENCE) is None


def test_a_slurm_node_has_its_own_name() -> None:
    assert host_name({"SLURMD_NODENAME": "n2"}) == "n2"
    assert host_name({}) != ""
