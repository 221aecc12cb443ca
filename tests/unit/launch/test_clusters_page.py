"""Commands of the pages on clusters and of jobset.yaml parse, with the ranks of their configs."""

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from mlperf_bert.__main__ import make_parser
from mlperf_bert.config.files import find_config, load_config
from support import PACKAGE, REPOSITORY

PAGES = [
    (REPOSITORY / f"docs/guides/{name}.md").read_text("utf-8") for name in ("clusters", "slurm")
]
PAGE = "".join(PAGES).replace("\\\n", " ")
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^\| [^|]+ \| `(.+)` \|$", PAGE, re.MULTILINE)
COMMANDS += "".join(BLOCKS).splitlines()
JOBSET = PACKAGE.parent / "launch/jobset.yaml"


def trained(words):
    """The arguments of torchrun, and the config of the `train` that it starts."""
    asked = get_args_parser().parse_args(words)
    assert asked.module and asked.training_script == "mlperf_bert"
    args = make_parser(asked.training_script_args).parse_args(asked.training_script_args)
    config = load_config(args.config, args.set)
    assert config.parallel.nodes == int(asked.nnodes)
    assert config.parallel.ranks_per_node == int(asked.nproc_per_node)
    assert args.resume == "auto" and args.run_dir and args.init_checkpoint  # a closed config
    return asked, config


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_parses(command):
    words = shlex.split(command)
    named = re.search(r"CONFIG=(\w+)|slurm_options\.py (\w+)", command)
    if named and not command.startswith("CONFIG=runs/"):
        config = load_config(find_config(named[1] or named[2]))
        started = re.search(r"mpiexec -n (\d+)", command)
        assert started is None or int(started[1]) == config.parallel.world_size
    if words[1:2] == [".venv/bin/torchrun"]:
        assert words[0] == "PYTHONSAFEPATH=1"  # its ranks look for no code where it is started
        trained(words[2:])
    elif words[0] == ".venv/bin/mlperf_bert":
        args = make_parser(words[1:]).parse_args(words[1:])
        if "--rehearse" in words:
            assert 0 <= args.rehearse < load_config(args.config).parallel.world_size
        else:
            assert args.out in (Path("runs/two.toml"), Path("WEIGHTS"))
    elif words[0] == "export":
        assert all(re.fullmatch("[A-Z_]+=[^$]+", word) for word in words[1:])
    elif words == ["TORCH=cuda", "tools/venv.sh"]:
        assert "# TORCH=cuda installs the build for GPUs" in (REPOSITORY / words[1]).read_text()
    elif words[0] == "srun":
        program = words[words.index("mlperf_bert") + 1 :]
        assert find_config(make_parser(program).parse_args(program).config).is_file()
    elif words[0] == "kubectl":
        assert (REPOSITORY / words[-1]).samefile(JOBSET)
    else:
        assert "run_and_time.sh" in words[-1]
        script = re.search(r"sbatch \$\((\S+) ", command)
        assert script is None or (REPOSITORY / script[1]).is_file()


def test_the_jobset_starts_the_ranks_of_its_config():
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load(JOBSET.read_text("utf-8"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-P", "-m", "torch.distributed.run"]
    args = [each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in container["args"]]
    asked, config = trained(args)
    nodes = replicated["replicas"] * job["parallelism"]
    assert nodes == job["completions"] == config.parallel.nodes and asked.node_rank == 1
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == config.parallel.ranks_per_node
    # JobSet's name of the first pod: <jobset>-<replicated job>-<job>-<pod>.<subdomain>
    name = jobset["metadata"]["name"]
    assert asked.master_addr == f"{name}-{replicated['name']}-0-0.{name}"
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
