"""launch/slurm_options.py, run by the oldest Python that is here, as on a login node.

Its options survive the shell, and what it refuses is not submitted.
"""

import ast
import os
import shutil
import subprocess

import pytest

from mlperf_bert.config.files import config_to_toml, load_config
from mlperf_bert.config.settings import all_settings
from support import CONFIGS, REPOSITORY, load_study, oldest_python, write_program

LAUNCH = "benchmarks/bert/implementations/pytorch/launch"
SCRIPT = REPOSITORY / LAUNCH / "slurm_options.py"
LARGEST = CONFIGS / "dgxa100_128x8x4x1.toml"
RUNS = ",TIMED_NEXP=1"


def ask(*words, script=SCRIPT, directory=None, **environ):
    """The answer of the script, with no other variables that it reads than these."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [oldest_python(), "-I", script, *words]
    given = kept | {name: str(value) for name, value in environ.items()}
    return subprocess.run(command, env=given, cwd=directory, capture_output=True, text=True)


def options_of(*words, **environ):
    """The printed options, of a job with PYTHON unless `environ` says otherwise."""
    done = ask(*words, **{"PYTHON": "python3", **environ})
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done.stderr
    return done.stdout.split()


def error_of(*words, **environ):
    """The one line of a refusal, whose option makes sbatch fail too."""
    done = ask(*words, **environ)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "--not-submitted\n", 1)
    assert done.stderr.startswith("slurm_options.py: error: "), done.stderr
    return done.stderr


def test_it_reads_as_python_of_the_oldest_login_node():
    ast.parse(SCRIPT.read_text("utf-8"), feature_version=(3, 8))
    assert SCRIPT.stat().st_mode & 0o111
    print(f"run by {oldest_python()}")


def test_its_settings_have_the_defaults_and_words_of_the_package():
    module = load_study(SCRIPT.parent, SCRIPT.stem)
    for name, (default, words) in module.SETTINGS.items():
        setting = all_settings()[name]
        assert (setting.default, setting.words) == (default, words)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_read_as_the_package_reads_it(path, tmp_path):
    config = load_config(path)
    if path == LARGEST:  # its complete text, as a user saves it with `config show`
        path = tmp_path / path.name
        path.write_text(config_to_toml(config))
    device = [f"--gpus-per-node={config.parallel.ranks_per_node}"] * (config.run.device == "cuda")
    expected = [
        f"--nodes={config.parallel.nodes}",
        f"--ntasks-per-node={config.processes_per_node}",
        f"--time={10 * config.run.slurm_minutes + 5}",
        *device,
    ]
    name, *size, export = options_of(path, NEXP=10)
    assert (name, size) == (f"--job-name={path.stem}", expected)
    assert export == f"--export=ALL,CONFIG={path},TIMED_NEXP=10"


@pytest.mark.parametrize(
    ("sinfo", "asks"),
    [
        ("echo '(null)'; echo 'gpu:a100:8(S:0-1)'", True),
        ("echo '(null)'", False),
        ("exit 1", True),  # no SLURM that answers
    ],
)
def test_gpus_are_asked_for_where_slurm_counts_them(sinfo, asks, tmp_path):
    write_program(tmp_path / "sinfo", f"#!/bin/sh\n{sinfo}\n")
    sets = ["--set", "parallel.nodes=2", "--set", "data.loader='mpi_readers'"]
    sets += ["--set", "run.slurm_minutes = 90"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    _, *options, _ = options_of(LARGEST.stem, *sets, PATH=path, SHARP=1)
    size = ["--nodes=2", "--ntasks-per-node=16", "--time=95"]
    assert options == [*size, *["--gpus-per-node=8"] * asks, "--network=sharp"]


def test_options_survive_the_shell_and_the_path_is_made_absolute(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '\ufeff# mine\n[ parallel ] # two\nlocal_batch_size = 1_6\nnodes = 2 # "x"\n\n'
        '[run]\ndevice = \'cpu\'\n[mlperf]\nsubmission_org = "a \\" # [b]"\n',
        encoding="utf-8",
    )
    done = ask("mine.toml", directory=tmp_path)
    shell = f"printf '%s\\n' $(printf %s '{done.stdout.strip()}')"
    split = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert split.stdout.splitlines() == [
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=245",
        f"--export=ALL,CONFIG={tmp_path}/mine.toml{RUNS}",
    ]


@pytest.fixture
def clone(tmp_path):
    """A repository in a path with a space, with a .venv whose torch is for GPUs."""
    tree = tmp_path / "a tree"
    for name in (LAUNCH, f"{LAUNCH}/../mlperf_bert/configs"):
        shutil.copytree(REPOSITORY / name, tree / name)
    torch = tree / ".venv/lib/python3.12/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    return tree


def test_a_job_with_gpus_needs_an_environment_with_cuda(clone):
    script = clone / LAUNCH / SCRIPT.name
    done = ask(LARGEST.stem, script=script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"=ALL,CONFIG={LARGEST.stem}{RUNS}\n")  # a path would be split
    (version,) = clone.glob(".venv/lib/*/*/torch/version.py")
    version.write_text("cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    error = error_of(LARGEST.stem, script=script)
    assert f"{clone}/.venv: has torch for CPUs, but {LARGEST.stem} needs GPUs; type: rm -r" in error
    assert "TORCH=cuda tools/venv.sh" in error
    for given in ({"CONT": "/shared/image.sqsh"}, {"PYTHON": "python3"}):
        assert ask(LARGEST.stem, script=script, **given).stderr == ""
    assert ask("cpu_tiny", script=script).stderr == ""
    shutil.rmtree(clone / ".venv")
    error = error_of(LARGEST.stem, script=script)
    assert f".venv: has no torch, but {LARGEST.stem} needs GPUs; type: TORCH=cuda tools/" in error


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("run = { device = 'cpu' }", (), "mine.toml: cannot read line 1; write it as [section] or"),
        ('[run]\ncorpus = """\n', (), "mine.toml: cannot read line 2"),
        ("[run]\ndevice = 'gpu'", (), "run.device must be 'auto' or 'cpu' or 'cuda', not 'gpu'"),
        ("", ("--set", "parallel.nodes=0"), "--set: parallel.nodes must be a positive integer, no"),
        ("", ("--set", "nodes=2"), "--set: cannot read 'nodes=2'; use the form SECTION.KEY=VALUE"),
        ("", ("--sets", "parallel.nodes=2"), "unrecognized arguments: --sets"),
        (None, (), "mine.toml: No such file or directory; pass a TOML file"),
    ],
)
def test_what_it_cannot_read_is_not_submitted(text, words, said, tmp_path):
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    assert said in error_of("mine.toml", *words, directory=tmp_path)


def test_a_job_lasts_until_ranks_that_cannot_meet_have_said_so():
    _, _, _, time, *_ = options_of("cpu_tiny", "--set", "run.slurm_minutes=1")
    assert time == "--time=15"


def test_names_and_variables_that_are_wrong_are_not_submitted(tmp_path):
    assert "did you mean h100_2x8x48x1?" in error_of("h100_2x8x4x1")
    assert "NEXP: 'ten' is not a positive integer" in error_of("cpu_tiny", NEXP="ten")
    assert "SHARP: 'yes' is neither 1 nor 0" in error_of("cpu_tiny", SHARP="yes")
    for bad in " ,*[']\n$\\":
        path = tmp_path / f"a{bad}b.toml"
        shutil.copy(CONFIGS / "cpu_tiny.toml", path)
        error = error_of(path)
        assert f"has {bad!r} in its path" in error and "use only letters, digits and" in error
