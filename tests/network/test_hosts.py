"""Two network namespaces as two hosts: a run crosses the link between them, and survives no cut.

While ranks of one of them run, nobody outside it can speak to it.

Left out by ./run_tests.sh: `make test-real`, one of them `make test-slow`.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from forked_ranks import run_ranks
from hosts import ADDRESSES, INTERFACE, linked_hosts
from listening import is_loopback, listeners, tree
from support import (
    PACKAGE,
    REPOSITORY,
    TOOLS,
    metrics_losses,
    sets_of,
)

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
PAGE = (REPOSITORY / "docs/guides/clusters.md").read_text("utf-8").replace("\\\n", " ")
(PAGE_LINE,) = re.findall(r"^PYTHONSAFEPATH=1 \.venv/bin/torchrun +(.+)$", PAGE, re.MULTILINE)
PAGE_LINE = " ".join(PAGE_LINE.split())
HOOK = Path(__file__).parents[1] / "pickle_audit"
TWO_NODES = ("parallel.nodes=2", "parallel.local_batch_size=8", "run.seed=11")
ENDLESS = ("run.max_steps=1000000", "eval.interval_samples=10000000")
TWO_RANKS = ("parallel.ranks_per_node=2", "parallel.local_batch_size=8")
ANSWER = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"
REFUSED = f"{errno.ECONNREFUSED}\n"
TIMEOUT_S = 8  # run.hang_timeout_s of the run whose link is cut
SLACK_S = 8  # for a rank to see it and say so, on a machine that has other work


@pytest.fixture
def hosts():
    with linked_hosts(2) as names:
        yield names


def on_host(host, *words, output=subprocess.PIPE, **environ):
    """Python with these words, as a process of a host."""
    own = {name: str(value) for name, value in environ.items()}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | own,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(hosts, tiny, run_dir, *settings):
    """Start the torchrun line of docs/guides/clusters.md on each host, with one CPU rank."""
    line = PAGE_LINE
    for theirs, ours in {
        "--nproc-per-node 8": "--nproc-per-node 1",
        " node0 ": f" {ADDRESSES[0]} ",
        "h100_2x8x48x1": str(tiny[1]),
        "--data DATA --init-checkpoint WEIGHTS": f"--data {tiny[0]}",
        "runs/sixteen": str(run_dir),
    }.items():
        assert theirs in line
        line = line.replace(theirs, ours)
    return [
        on_host(
            *(host, "-m", "torch.distributed.run"),
            *line.replace("--node-rank 0", f"--node-rank {node}").split(),
            *sets_of(*TWO_NODES, *settings),
            GLOO_SOCKET_IFNAME=INTERFACE,
        )
        for node, host in enumerate(hosts)
    ]


def left_in(host):
    done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
    return done.stdout.split()


def sent_bytes(host):
    counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    command = ["ip", "netns", "exec", host, "cat", counter]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.real
def test_a_run_crosses_the_link(hosts, tiny, tmp_path):
    processes = start(hosts, tiny, tmp_path / "apart")
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert "target NOT reached after 320 samples" in outputs[0], outputs
    gradients = re.search(r"([\d,]+) parameters, 2 ranks", outputs[0])
    assert gradients
    for host in hosts:
        assert sent_bytes(host) > 20 * 4 * int(gradients[1].replace(",", ""))
        assert left_in(host) == []

    words = ["--config", tiny[1], "--data", tiny[0], "--run-dir", tmp_path / "together"]
    run_ranks("mlperf_bert", ["train", *words, *sets_of(*TWO_RANKS, "run.seed=11")], 2)
    apart, together = metrics_losses(tmp_path / "apart"), metrics_losses(tmp_path / "together")
    assert len(apart) == 20
    # Not bit for bit: a rank alone on its host has the threads of two.
    assert apart == pytest.approx(together, rel=1e-6)


@pytest.mark.real
def test_a_cut_link_ends_both_sides(hosts, tiny, tmp_path):
    run_dir = tmp_path / "run"
    processes = start(hosts, tiny, run_dir, *ENDLESS, f"run.hang_timeout_s={TIMEOUT_S}")
    metrics = run_dir / "run_0/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 120)
    subprocess.run(["ip", "-n", hosts[1], "link", "set", INTERFACE, "down"], check=True)
    cut = time.monotonic()
    with ThreadPoolExecutor() as pool:  # each side's words are looked at when they come
        said = list(pool.map(time_of_the_error, processes, range(2)))
    assert all(moment - cut < TIMEOUT_S + SLACK_S for moment in said)
    for process, host in zip(processes, hosts, strict=True):
        process.communicate(timeout=60)  # torchrun waits for its other host as well
        assert process.returncode != 0
        assert left_in(host) == []


@pytest.mark.longest
def test_ranks_listen_on_the_address_of_the_nodes_alone(hosts, tiny, tmp_path):
    """As srun starts them, with no port and no interface given; nothing comes out of a pickle."""
    data, config = tiny
    words = ["train", "--config", config, "--data", data, "--run-dir", tmp_path / "run"]
    words += sets_of(*TWO_NODES, *ENDLESS)
    audit = tmp_path / "audit.jsonl"
    tasks = [start_task(rank, host, words, audit) for rank, host in enumerate(hosts)]
    metrics = tmp_path / "run/run_0/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 120)
    found = [listeners(tree(task.pid)) for task in tasks]
    for task in tasks:
        task.terminate()
    outputs = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [75, 75], outputs
    print(f"listening: {found}")
    (store,) = {int(each.rpartition(":")[2]) for each in found[0]} & set(range(20_000, 32_000))
    assert f"{ADDRESSES[0]}:{store}" in found[0]
    for address, addresses in zip(ADDRESSES[: len(found)], found, strict=True):
        assert addresses and {each.rpartition(":")[0] for each in addresses} == {address}
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert not [entry for entry in entries if "found" in entry and entry["cache"] is None]
    assert sum("command" in entry for entry in entries) == 2


@pytest.mark.real
def test_hosts_whose_own_names_are_loopback_addresses(hosts, tiny, tmp_path):
    """`127.0.1.1 name` in /etc/hosts, as on Ubuntu; the other host's name is in there too."""
    data, config = tiny
    words = ["train", "--config", config, "--data", data, "--run-dir", tmp_path / "run"]
    words += sets_of(*TWO_NODES, "run.max_steps=2")
    names = ("node1", "node2")
    with ExitStack() as stack:
        tasks = []
        for rank, host in enumerate(hosts):
            files = Path("/etc/netns") / host  # which `ip netns exec` mounts over those in /etc
            files.mkdir(parents=True)
            stack.callback(shutil.rmtree, files)
            other = f"{ADDRESSES[1 - rank]} {names[1 - rank]}"
            files.joinpath("hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {names[rank]}\n{other}\n"
            )
            environ = {
                "SLURMD_NODENAME": names[rank],
                "SLURM_STEP_NODELIST": "node[1-2]",
            }
            tasks.append(start_task(rank, host, words, tmp_path / "audit.jsonl", **environ))
        outputs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [3, 3], outputs
    assert f"ranks meet at {ADDRESSES[0]}, because node1 is a loopback address here" in outputs[0]
    assert "ranks meet" not in outputs[1]


@pytest.mark.real
def test_a_slow_link_is_said_before_training(hosts, tiny, tmp_path):
    """The link gets a twentieth of the bandwidth that the config's machine should have."""
    for host in hosts:
        limit = ["rate", "400mbit", "burst", "64kb", "latency", "50ms"]
        shaped = [
            "ip",
            "netns",
            "exec",
            host,
            "tc",
            "qdisc",
            "add",
            "dev",
            INTERFACE,
            "root",
            "tbf",
        ]
        subprocess.run([*shaped, *limit], check=True)
    words = ["network-test", "--config", tiny[1], *sets_of(*TWO_NODES, "parallel.network_gb_s=1.0")]
    tasks = [
        start_task(rank, host, words, tmp_path / "audit.jsonl") for rank, host in enumerate(hosts)
    ]
    outputs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2], outputs
    said = r"error: network: the all-reduce reached ([\d.]+)% of the 1 GB/s in parallel"
    found = re.search(said, outputs[0])
    assert found and 1 < float(found[1]) < 6, outputs
    assert "2 ranks with gloo over veth0: all sums are exact" in outputs[0]
    assert "network:" not in outputs[1]


def start_task(rank, host, words, audit, **more):
    """One of two tasks on two nodes of a SLURM step."""
    environ = {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        **{"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"},
        **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": ADDRESSES[0]},
        "PICKLE_AUDIT": audit,
        "PYTHONPATH": os.pathsep.join(map(str, (HOOK, PACKAGE.parent, TOOLS.parent))),
    }
    return on_host(host, "-m", "mlperf_bert", *words, **environ | more)


def time_of_the_error(process, rank):
    """When this rank said that the others are silent; fails where it never did."""
    expected = rf"rank {rank} on \S+, .+: other ranks did not answer within {TIMEOUT_S} s"
    said = []
    for line in process.stdout or ():
        said.append(line)
        if re.search(expected, line):
            return time.monotonic()
    raise AssertionError("".join(said))


def wait_until(condition, timeout):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def commands(tiny, directory):
    """The commands that start ranks by themselves; `bench` starts none."""
    data, config = tiny
    two, endless = sets_of(*TWO_RANKS), sets_of(*ENDLESS)
    given = ["--config", config, "--data", data]
    squad = ["--layers", 2, "--hidden", 16, "--updates", 10000, "--device", "cpu"]
    return {
        "train": ["train", *given, "--run-dir", directory / "run", *two, *endless],
        "network-test": ["network-test", "--config", config, *two],
        "squad": ["squad", "train", "--engine", "pipeline:2", "--run-dir", directory / "s", *squad],
        "tune": ["tune", *given, "--space", "around", "--out", directory / "study", *two],
    }


@pytest.mark.real
def test_nobody_outside_can_connect(hosts, tiny, tmp_path):
    """All commands at once: most of their time is the start of their ranks."""
    with ExitStack() as stack:
        running = {}
        for name, words in commands(tiny, tmp_path).items():
            output = stack.enter_context((tmp_path / f"{name}.output").open("w"))
            process = on_host(hosts[0], "-m", "mlperf_bert", *words, output=output)
            running[name] = stack.enter_context(process)
        stack.callback(lambda: [process.terminate() for process in running.values()])
        found = {name: set() for name in running}
        deadline = time.monotonic() + 120
        while not all(map(have_met, found.values())):
            assert time.monotonic() < deadline, found
            for name, process in running.items():
                has_ended = process.poll() is not None
                found[name] |= set(listeners(tree(process.pid)))
                output = tmp_path / f"{name}.output"
                assert have_met(found[name]) or not has_ended, output.read_text()
        assert all(is_loopback(place) for places in found.values() for place in places), found
        for place in found["train"] - {"unix"}:  # which is still there
            for host in hosts:  # from the machine's own other address, and a neighbour's
                assert answer(host, place) == REFUSED, place
    print(*(f"{name}: {' '.join(sorted(places))}" for name, places in found.items()), sep="\n")


def have_met(places):
    """Whether both ranks of a command listened, for gloo's connections."""
    return len(places - {"unix"}) >= 2


def answer(host, place):
    """The answer to a connection from `host` to the port at the first host's address."""
    command = ["ip", "netns", "exec", host, sys.executable, "-SEc", ANSWER, ADDRESSES[0]]
    return subprocess.run(
        [*command, place.rpartition(":")[2]], capture_output=True, text=True, check=True
    ).stdout
