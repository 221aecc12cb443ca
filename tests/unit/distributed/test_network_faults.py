"""A network that does not work is named by its own cause, and no time that did not pass."""

import errno
import os
import socket
from datetime import timedelta

import pytest

from mlperf_bert.distributed import spawn
from mlperf_bert.distributed.failures import as_lost_ranks
from mlperf_bert.distributed.rendezvous import check_interfaces, has_address, transport
from mlperf_bert.errors import ConfigError

PATIENCE = timedelta(minutes=10)
LO = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@pytest.mark.parametrize(
    ("name", "backend", "value", "said"),
    [
        ("GLOO_SOCKET_IFNAME", "gloo", "eth9x", "no network interface named 'eth9x'"),
        ("GLOO_SOCKET_IFNAME", "nccl", f"{LO},ib7x", "no network interface named 'ib7x'"),
        ("GLOO_SOCKET_IFNAME", "gloo", "down", "interface down has no IP address"),
        ("NCCL_SOCKET_IFNAME", "nccl", "ib7x,ib8x", "interface of this host matches 'ib7x,ib8x'"),
        ("NCCL_SOCKET_IFNAME", "nccl", f"={LO}x", "no network interface of this host matches"),
    ],
)
def test_an_interface_that_is_not_there_is_named(monkeypatch, name, backend, value, said):
    names = [*socket.if_nameindex(), (9, "down")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: names)
    with pytest.raises(ConfigError) as caught:
        check_interfaces({name: value}, backend)
    where, problem, remedy = caught.value.args
    assert (where, said in problem, LO in remedy) == (name, True, True)


def test_interfaces_that_are_there_are_taken():
    for value in ("", LO, f"{LO},{LO}"):
        check_interfaces({"GLOO_SOCKET_IFNAME": value}, "gloo")
    for value in ("", LO, LO[:1], f"={LO}", "^docker", f"ib7x,{LO}"):
        check_interfaces({"NCCL_SOCKET_IFNAME": value}, "nccl")
    check_interfaces({"NCCL_SOCKET_IFNAME": "ib7x"}, "gloo")  # which does not look at it
    assert has_address(LO)


def test_ranks_are_not_started_without_loopback(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(
        ConfigError, match=r"loopback interface cannot be used \(127.0.0.1: Network"
    ):
        spawn.run_on_ranks(["train"], 2)


SAID = {  # an error of a collective, and what is said of it
    "[a/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 602000ms for recv operation": (
        "other ranks did not answer within 600 s (run.hang_timeout_s)"
    ),
    "[a/gloo/transport/tcp/pair.cc:1] Timed out waiting 1500ms for send": (
        "other ranks did not answer within 1.5 s (run.hang_timeout_s)"
    ),
    "Application timeout caused pair closure": (
        "other ranks did not answer within 600 s (run.hang_timeout_s)"
    ),
    "[a/gloo/transport/tcp/pair.cc:547] Connection timed out": (
        "the network connection to another rank failed (connection timed out)"
    ),
    "[a/gloo/transport/tcp/pair.cc:1] connect: Network is unreachable": (
        "the network connection to another rank failed (network is unreachable)"
    ),
    "[a/gloo/transport/tcp/device.cc:84] Unable to find address for: eth9": (
        "the network connection to another rank failed (unable to find address for: eth9)"
    ),
    "[a/gloo/transport/tcp/pair.cc:1] Connect timeout": "other ranks did not answer in time",
    "[a/gloo/transport/tcp/pair.cc:1] Timed out after 61 seconds waiting for clients": (
        "other ranks did not answer within 61 s (run.hang_timeout_s)"
    ),
    "[a/gloo/transport/tcp/pair.cc:1] connect: Connection refused": (
        "another rank closed the connection"
    ),
    "[a/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.1]:7200": (
        "another rank closed the connection"
    ),
}


@pytest.mark.parametrize("text", SAID)
def test_no_time_is_named_that_did_not_pass(text):
    error = as_lost_ranks(RuntimeError(text), "rank 0", PATIENCE)
    assert error.args[1] == SAID[text]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "n:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
            "n:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0<0>\n"
            "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n",
            "nccl over IB (mlx5_0, mlx5_3), directly from GPU memory",
        ),
        (
            "n:1:1 [0] NCCL INFO NET/IB : No device found.\n"
            "n:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]ib0:10.1.0.1<0>\n",
            "nccl over Socket (eth0, ib0)",
        ),
        (
            "n:1:1 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [RO]\n",
            "nccl over IB (mlx5_0, mlx5_1)",
        ),
        ("", "nccl over an unknown network"),
    ],
)
def test_what_nccl_wrote_names_its_network(lines, said):
    assert transport("nccl", lines) == said
    assert transport("gloo", lines, {"GLOO_SOCKET_IFNAME": "eth7"}) == "gloo over eth7"
