"""The lock: it is whole, its lines are chosen, and a file with another digest is refused."""

import re
import shutil
import sysconfig
import tomllib
import venv
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lock
from support import REPOSITORY, run_process

PYPROJECT = REPOSITORY / "pyproject.toml"
LOCK = REPOSITORY / "requirements"
TICKING = "benchmarks/bert/implementations/pytorch/launch/ticking.sh"
NAMES = ("hashed.txt", "pinned.txt")
EXTRAS = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
BACKEND = """
from pathlib import Path
from shutil import copy
def build_editable(directory, settings=None, metadata=None):
    return Path(copy("wheels/mine-1-py3-none-any.whl", directory)).name
"""


@pytest.fixture
def checkout(tmp_path):
    """A project with one requirement, its wheel, the real scripts, and a .venv with a pip."""
    root = tmp_path / "checkout"
    for name in ("tools/venv.sh", "tools/lock.py", TICKING):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "mine"\nversion = "1"\ndependencies = ["leaf"]\n'
    )
    (root / "wheels").mkdir()
    for name in ("leaf", "mine", "red", "blue"):
        with zipfile.ZipFile(root / "wheels" / f"{name}-1-py3-none-any.whl", "w") as wheel:
            about = f"{name}-1.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
            )
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    venv.create(root / ".venv", symlinks=True)
    pip = Path(sysconfig.get_path("purelib"), "pip")  # seconds sooner than a venv with one
    site = next((root / ".venv").glob("lib/python*/site-packages"))
    (site / "pip").symlink_to(pip)
    return root


def install(root, environ=None, *extras, **lines):
    """Run tools/venv.sh, after the lock's files were changed to `lines`, by their names."""
    (root / "requirements").mkdir(exist_ok=True)
    for name, text in lines.items():
        (root / "requirements" / f"{name}.txt").write_text(text)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (root / "wheels").as_uri(), "PYTHONPATH": ""}
    return run_process(root / "tools" / "venv.sh", *extras, **offline | (environ or {}))


def test_every_extra_can_be_installed_by_the_lock():
    project = tomllib.loads(PYPROJECT.read_text())
    always = project["build-system"]["requires"] + project["project"]["dependencies"]
    for extras in ((), *((extra,) for extra in EXTRAS), tuple(EXTRAS)):
        texts = lock.select(LOCK, PYPROJECT, extras, set())
        chosen = lock.read(texts["hashed.txt"]) | lock.read(texts["pinned.txt"])
        asked = [each for extra in extras for each in EXTRAS[extra]]
        for requirement in map(Requirement, always + asked):
            if requirement.name != "mlperf-bert":
                (line, *_) = chosen[canonicalize_name(requirement.name)]
                (pin,) = Requirement(line.removesuffix(" \\")).specifier
                assert pin.operator == "==" and requirement.specifier.contains(pin.version), line


def test_everything_has_digests_but_what_indexes_build_anew():
    hashed, pinned = (lock.read((LOCK / name).read_text()) for name in NAMES)
    assert len(hashed) > 100 and not hashed.keys() & pinned.keys()
    for name, lines in hashed.items():
        assert re.match(r"[a-z0-9-]+==[\w.]+( ; .*)? \\$", lines[0]), name
        assert not name.startswith(("torch", "triton", "nvidia-", "cuda-")), name
        digests = [line for line in lines[1:] if not line.startswith("    #")]
        assert digests and all(HASH.fullmatch(line) for line in digests), name
    for name, lines in pinned.items():
        assert re.fullmatch(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)", name)
        assert re.match(r"[a-z0-9-]+==[\d.]+( ; .*)?$", lines[0]), name


def test_what_is_there_stays_and_what_builds_the_package_is_the_locks():
    whole, rest = (
        {
            name: lock.read(text)
            for name, text in lock.select(LOCK, PYPROJECT, ["dev"], kept).items()
        }
        for kept in (set(), {"torch", "numpy", "setuptools"})
    )
    assert {"mpi4py", "hypothesis"} <= whole["hashed.txt"].keys()  # of an extra that dev names
    assert {"torch"} == whole["pinned.txt"].keys() - rest["pinned.txt"].keys()
    gone = whole["hashed.txt"].keys() - rest["hashed.txt"].keys()
    assert {"numpy", "sympy"} <= gone  # torch's own needs are not looked at
    assert {"setuptools", "scipy"} <= rest["hashed.txt"].keys() and len(gone) < 10
    with pytest.raises(ValueError, match="no extra 'x'; use dali, mpi, "):
        lock.select(LOCK, PYPROJECT, ["tune", "x"], set())


def test_what_uv_wrote_is_split():
    hashed, pinned = ((LOCK / name).read_text() for name in NAMES)
    digested = pinned.replace("torch==", "torch==9 \\\n    --hash=sha256:00\ntorch==")
    twice = "torchmetrics==1 \\\n    --hash=sha256:00\n" * 2  # for two versions of Python
    texts = lock.split(digested + twice + hashed)
    assert texts["pinned.txt"] == lock.split(pinned)["pinned.txt"].replace(
        "torch==", "torch==9\ntorch=="
    )
    assert texts["hashed.txt"].replace(twice, "") == lock.split(hashed)["hashed.txt"]
    assert twice in texts["hashed.txt"]


def test_another_file_than_the_locks_is_refused(checkout):
    digest = sha256((checkout / "wheels" / "leaf-1-py3-none-any.whl").read_bytes()).hexdigest()
    asked = "leaf==1 \\\n    --hash=sha256:{}\n"
    refused = install(checkout, hashed=asked.format("0" * 64), pinned="")
    assert refused.returncode == 2
    assert digest in refused.stderr  # pip names both
    assert refused.stderr.splitlines()[-1].startswith(
        "tools/venv.sh: error: the installation into .venv"
    )
    assert not list(checkout.glob(".venv/**/leaf*")) and not (checkout / ".venv/installed").exists()
    done = install(checkout, hashed=asked.format(digest))
    assert done.returncode == 0, done.stderr
    found = {path.name for path in checkout.glob(".venv/**/*.dist-info")}
    assert {"leaf-1.dist-info", "mine-1.dist-info"} <= found
    assert install(checkout).stdout == ""  # nothing to do
    changed = install(checkout, hashed="")
    assert changed.returncode == 2 and "run make lock" in changed.stderr


@pytest.mark.longest
def test_several_extras_are_installed_and_an_unknown_word_is_refused(checkout):
    """Without a network: the wheels are those of the fixture."""
    with (checkout / "pyproject.toml").open("a") as file:
        file.write('[project.optional-dependencies]\nred = ["red"] # about 3 MB\n')
        file.write('blue = ["blue"] # about 4 MB\n[tool.x]\ngreen = 1\n')
    wheels = {
        name: checkout / f"wheels/{name}-1-py3-none-any.whl" for name in ("leaf", "red", "blue")
    }
    digests = {name: sha256(path.read_bytes()).hexdigest() for name, path in wheels.items()}
    locked = "".join(f"{name}==1 \\\n    --hash=sha256:{digests[name]}\n" for name in wheels)
    unknown = install(checkout, None, "red", "green", hashed=locked, pinned="")
    listed = "tools/venv.sh: error: unknown extra 'green'; use one or more of red, blue\n"
    assert (unknown.returncode, unknown.stdout, unknown.stderr) == (2, "", listed)
    assert install(checkout).returncode == 0
    assert not list(checkout.glob(".venv/**/red-1.dist-info"))
    both = install(checkout, None, "red", "blue")
    assert both.returncode == 0, both.stderr
    assert "adding red, blue (up to 7 MB) to .venv; " in both.stdout
    assert both.stdout.endswith("installed red, blue into .venv\n")
    assert len(list(checkout.glob(".venv/**/*-1.dist-info"))) == len(wheels) + 1
    for words in ((), ("red",), ("blue",), ("blue", "red")):
        assert install(checkout, None, *words).stdout == ""  # nothing to do


@pytest.mark.longest
def test_pips_settings_do_not_install_elsewhere(checkout, tmp_path):
    """What else they set counts: here the place of the wheels."""
    elsewhere = tmp_path / "elsewhere"
    wheels = (checkout / "wheels").as_uri()
    text = f"[global]\nfind-links = {wheels}\n[install]\nuser = 1\ntarget = {elsewhere}\n"
    (tmp_path / "pip.conf").write_text(text)
    environ = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": ""}
    environ["PIP_PREFIX"] = str(elsewhere)
    digest = sha256((checkout / "wheels" / "leaf-1-py3-none-any.whl").read_bytes()).hexdigest()
    done = install(checkout, environ, hashed=f"leaf==1 \\\n    --hash=sha256:{digest}\n", pinned="")
    assert done.returncode == 0, done.stderr
    said = "ignoring pip's settings that would install elsewhere: prefix target user"
    assert said in done.stdout
    assert len(list(checkout.glob(".venv/**/leaf-1.dist-info"))) == 1
    assert not elsewhere.exists()
