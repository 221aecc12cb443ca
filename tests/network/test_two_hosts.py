"""Two network namespaces as two hosts: a run crosses the link between them, and survives no cut.

Left out by ./run_tests.sh; `make test-real` runs them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from listening import listeners, tree
from support import PACKAGE, REPOSITORY, TOOLS, make_tiny_inputs, metrics_losses, run_process

sys.path.insert(0, str(REPOSITORY / "logs" / "2026-11-21-overlap"))
from overlap_link import ADDRESSES, INTERFACE, linked_namespaces

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
HOOK = Path(__file__).parents[1] / "pickle_audit"
TWO_NODES = ("parallel.nodes=2", "parallel.local_batch_size=8", "run.seed=11")
ENDLESS = ("run.max_steps=1000000", "eval.interval_samples=10000000")
TIMEOUT_S = 8  # run.hang_timeout_s of the run whose link is cut
SLACK_S = 8  # for a rank to see it and say so, on a machine that has other work


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_tiny_inputs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    with linked_namespaces() as names:
        yield names


def start(
    hosts: tuple[str, ...], tiny: tuple[Path, Path], run_dir: Path, *settings: str
) -> list[subprocess.Popen[str]]:
    """torchrun on each host, as one starts it by hand on two machines."""
    data, config = tiny
    sets = [word for setting in (*TWO_NODES, *settings) for word in ("--set", setting)]
    train = ["-m", "mlperf_bert", "train", "--config", config, "--data", data, "--run-dir", run_dir]
    quiet = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    processes = []
    for node, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}"]
        command += ["--master-port=29611", "--nproc-per-node=1", *map(str, train), *sets]
        processes.append(
            subprocess.Popen(
                command,
                env=os.environ | quiet,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def left_in(host: str) -> list[str]:
    done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
    return done.stdout.split()


def sent_bytes(host: str) -> int:
    counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    command = ["ip", "netns", "exec", host, "cat", counter]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_run_crosses_the_link(
    hosts: tuple[str, ...], tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    processes = start(hosts, tiny, tmp_path / "apart")
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert "target NOT reached after 320 samples" in outputs[0], outputs
    gradients = re.search(r"([\d,]+) parameters, 2 ranks", outputs[0])
    assert gradients
    for host in hosts:
        assert sent_bytes(host) > 20 * 4 * int(gradients[1].replace(",", ""))
        assert left_in(host) == []

    data, config = tiny
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    one_host = ("parallel.ranks_per_node=2", "parallel.local_batch_size=8", "run.seed=11")
    run_process(
        *(sys.executable, *launcher, "-m", "mlperf_bert", "train", "--config", config),
        *("--data", data, "--run-dir", tmp_path / "together"),
        *(word for setting in one_host for word in ("--set", setting)),
    )
    apart, together = metrics_losses(tmp_path / "apart"), metrics_losses(tmp_path / "together")
    assert len(apart) == 20
    # Not bit for bit: a rank alone on its host has the threads of two.
    assert apart == pytest.approx(together, rel=1e-6)


def test_a_cut_link_ends_both_sides(
    hosts: tuple[str, ...], tiny: tuple[Path, Path], tmp_path: Path
) -> None:
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


def test_ranks_listen_on_the_address_of_the_nodes_alone(
    hosts: tuple[str, ...], tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    """As srun starts them, with no port and no interface given; nothing comes out of a pickle."""
    data, config = tiny
    words = ["train", "--config", config, "--data", data, "--run-dir", tmp_path / "run"]
    words += [word for setting in (*TWO_NODES, *ENDLESS) for word in ("--set", setting)]
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
    for address, addresses in zip(ADDRESSES, found, strict=True):
        assert addresses and {each.rpartition(":")[0] for each in addresses} == {address}
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert not [entry for entry in entries if "found" in entry and entry["cache"] is None]
    assert sum("command" in entry for entry in entries) == 2


def start_task(rank: int, host: str, words: Sequence[object], audit: Path) -> subprocess.Popen[str]:
    """One of two tasks on two nodes of a SLURM step."""
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": ADDRESSES[0],
        "OMP_NUM_THREADS": "1",
        "PICKLE_AUDIT": str(audit),
        "PYTHONPATH": os.pathsep.join(map(str, (HOOK, PACKAGE.parent, TOOLS.parent))),
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "mlperf_bert", *map(str, words)],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def time_of_the_error(process: subprocess.Popen[str], rank: int) -> float:
    """When this rank said that the others are silent; fails where it never did."""
    expected = rf"rank {rank} on \S+, .+: no answer from other ranks within {TIMEOUT_S} s"
    said = []
    for line in process.stdout or ():
        said.append(line)
        if re.search(expected, line):
            return time.monotonic()
    raise AssertionError("".join(said))


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
