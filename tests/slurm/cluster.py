"""A SLURM cluster of two nodes on this machine: real daemons, started and stopped by a test.

Both nodes are this host, so they differ by SLURM's names, by what is in `local`, each node's own
disk, and by /etc/hosts. Jobs get MASTER_ADDR, except one that meets by the first node's name.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked_ranks import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
CPUS = 8  # of a node, more than there are: its tasks share those of the machine
KILL_WAIT_S = 20  # between SIGTERM and SIGKILL
REQUEUE_S = 5  # for which a job that was requeued is held; 120 unless set
START_S = 60
# A slurmd that sees its own directory and its own /etc/hosts, and so do the jobs that it starts.
WITH_OWN_FILES = (
    """mount --bind "$1" "$2" && mount --bind "$3" /etc/hosts && shift 3 && exec "$@" """
)

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire={requeue}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait={kill_wait}
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=4000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """Commands of the cluster; jobs run in `tree`, a copy of the repository."""

    directory: Path
    tree: Path

    def run(self, command, timeout=60):
        """A shell command at the top of the tree, as a user of the cluster types it."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.tree,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    @property
    def local(self):
        """The path of a node's own disk, as a job on it sees it."""
        return self.directory / "local"

    def disk(self, node):
        """The contents of a node's own disk, seen from outside."""
        return self.directory / f"disk-{node}"

    @property
    def environ(self):
        """The environment of a login shell, with the address of rank 0 and gloo's interface."""
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI_"))}
        own = {
            "PYTHON": sys.executable,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        return outer | own

    def submit(self, command):
        """Run an sbatch command; the number of the job."""
        done = self.run(command)
        assert done.returncode == 0, done.stderr
        found = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert found, done.stdout
        return int(found[1])

    def output(self, job):
        """The output of the job."""
        path = self.tree / f"slurm-{job}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def state(self, job):
        """The fields that `scontrol` gives for a job: JobState, ExitCode and others."""
        done = self.run(f"scontrol --oneliner show job {job}")
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait(self, job, timeout):
        """The job's state when it has ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            state = self.state(job)
            if state["JobState"] not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
                return state
            time.sleep(0.3)
        raise AssertionError(f"job {job} has not ended in {timeout} s:\n{self.output(job)}")

    def wait_for_output(self, job, pattern, timeout):
        """Return when the job has printed a line that matches."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if re.search(pattern, self.output(job), re.MULTILINE):
                return
            time.sleep(0.3)
        raise AssertionError(f"job {job} has not said {pattern!r}:\n{self.output(job)}")


def missing():
    """Why no cluster can be started here; None where one can."""
    if os.geteuid() != 0:
        return "not root: SLURM's daemons are not started"
    absent = [name for name in (*DAEMONS, "rsync") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed: run tests/slurm/install.sh" if absent else None


@contextmanager
def started(directory, tree):
    """Start munge, the controller and two nodes; stop them, and what they run, at the end."""
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "state").mkdir()
    (directory / "local").mkdir()
    ports = [free_port() for _ in range(3)]
    (directory / "slurm.conf").write_text(
        CONFIGURATION.format(
            directory=directory,
            ports=ports,
            cpus=CPUS,
            kill_wait=KILL_WAIT_S,
            requeue=REQUEUE_S,
        )
    )
    cluster = Cluster(directory, tree)
    with ExitStack() as stack:
        stack.enter_context(_munge(directory))
        stack.enter_context(_process(["slurmctld", "-D", "-i"], cluster.environ))
        for node in NODES:
            cluster.disk(node).mkdir()
            hosts = directory / f"hosts-{node}"
            hosts.write_text(_hosts_of(node))
            private = ["unshare", "--mount", "sh", "-c", WITH_OWN_FILES, "sh"]
            private += [str(cluster.disk(node)), str(cluster.local), str(hosts)]
            stack.enter_context(_process([*private, "slurmd", "-D", "-N", node], cluster.environ))
        _wait_until_idle(cluster)
        yield cluster
        cluster.run("scancel --full --signal=KILL --state=RUNNING --user=root || true")


def address():
    """An address of this machine that is not a loopback one, with its interface; None if none."""
    listed = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True)
    found = re.findall(r"^\d+: (\S+) +inet ([\d.]+)/", listed.stdout, re.MULTILINE)
    return next(((name, each) for name, each in found if not each.startswith("127.")), None)


def _hosts_of(node):
    """/etc/hosts as Ubuntu has it: the node's own name is a loopback address, others are not."""
    lines = [Path("/etc/hosts").read_text(), f"127.0.1.1 {node}"]
    if found := address():
        lines += [f"{found[1]} {other}" for other in NODES if other != node]
    return "\n".join(lines) + "\n"


def _wait_until_idle(cluster):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        done = cluster.run("sinfo --noheader --format=%t --Node")
        if done.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.3)
    logs = "\n".join(path.read_text()[-2000:] for path in cluster.directory.glob("*.log"))
    raise AssertionError(f"the cluster has not come up: {done.stdout} {done.stderr}\n{logs}")


@contextmanager
def _munge(directory):
    """A munged of our own: own key and socket. As root, in a directory that only root may write."""
    home = directory / "munge"
    home.mkdir(mode=0o700)
    key = home / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    command = ["munged", "--foreground", "--force", f"--key-file={key}"]
    command += [f"--socket={directory}/munge.socket", f"--log-file={home}/log"]
    command += [f"--pid-file={home}/pid", f"--seed-file={home}/seed"]
    with _process(command, dict(os.environ)):
        deadline = time.monotonic() + START_S
        while not (directory / "munge.socket").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield


@contextmanager
def _process(command, environ):
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
