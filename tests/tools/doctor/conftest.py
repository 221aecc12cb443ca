"""A place where ranks of a test can meet."""

import socket

import pytest


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port that MASTER_PORT names, and no launcher's variables."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number
