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
TINY = {
    "hashed.txt": (
        "a==1 \\\n    --hash=sha256:00\n    # via mine (pyproject.toml)\n"
        "b==2 \\\n    --hash=sha256:00\n    # via\n    #   a\n    #   x\n"
        "c==3 ; python_version < '3.12' \\\n    --hash=sha256:00\n    # via b\n"
        "c==4 ; python_version >= '3.12' \\\n    --hash=sha256:00\n    # via b\n"
        "d==4 \\\n    --hash=sha256:00\n    # via mine (pyproject.toml)\n"
        "build-tool==5 \\\n    --hash=sha256:00\n"
    ),
    "pinned.txt": "torch==2\n    # via mine (pyproject.toml)\nnvidia-x==1\n    # via torch\n",
}
PROJECT = """
[build-system]
requires = ["build_tool>=1"]
[project]
name = "mine"
dependencies = ["A>=1", "torch>=2,<3"]
[project.optional-dependencies]
e = ["d[z]>=4"]
dev = ["mine[e]"]
lost = ["nowhere"]
"""
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
    for name in ("leaf", "mine"):
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


def install(root, environ=None, **lines):
    """Run tools/venv.sh, after the lock's files were changed to `lines`, by their names."""
    (root / "requirements").mkdir(exist_ok=True)
    for name, text in lines.items():
        (root / "requirements" / f"{name}.txt").write_text(text)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (root / "wheels").as_uri(), "PYTHONPATH": ""}
    return run_process(root / "tools" / "venv.sh", **offline | (environ or {}))


def test_every_extra_can_be_installed_by_the_lock():
    project = tomllib.loads(PYPROJECT.read_text())
    always = project["build-system"]["requires"] + project["project"]["dependencies"]
    for extra in (None, *EXTRAS):
        texts = lock.select(LOCK, PYPROJECT, extra, set())
        chosen = lock.read(texts["hashed.txt"]) | lock.read(texts["pinned.txt"])
        for requirement in map(Requirement, always + EXTRAS.get(extra, [])):
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


def test_lines_are_chosen_by_who_asks(tmp_path):
    for name, text in {**TINY, "pyproject.toml": PROJECT}.items():
        (tmp_path / name).write_text(text)
    rows = (
        (None, set(), {"a", "b", "c", "build-tool"}, {"torch"}),
        ("dev", set(), {"a", "b", "c", "d", "build-tool"}, {"torch"}),
        # What stays is not looked behind; what builds the package is always the lock's.
        (None, {"torch", "b", "build-tool"}, {"a", "build-tool"}, set()),
        (None, {"a", "torch"}, {"build-tool"}, set()),
    )
    for extra, present, hashed, pinned in rows:
        texts = lock.select(tmp_path, tmp_path / "pyproject.toml", extra, present)
        assert lock.read(texts["hashed.txt"]).keys() == hashed
        assert lock.read(texts["pinned.txt"]).keys() == pinned
        assert texts["hashed.txt"].count("--hash") == len(hashed) + ("c" in hashed)
    for extra, reason in (("lost", "nowhere, which the lock lacks"), ("x", "no extra 'x'")):
        with pytest.raises(ValueError, match=reason):
            lock.select(tmp_path, tmp_path / "pyproject.toml", extra, set())


def test_what_uv_wrote_is_split():
    torch = (
        "torch==2 ; sys_platform == 'linux' \\\n"
        "    --hash=sha256:00 \\\n    --hash=sha256:11\n    # via x\n"
    )
    texts = lock.split(torch + TINY["hashed.txt"] + "torchmetrics==1 \\\n    --hash=sha256:00\n")
    assert texts["pinned.txt"] == "torch==2 ; sys_platform == 'linux'\n    # via x\n"
    assert lock.read(texts["hashed.txt"]).keys() == {*"abcd", "build-tool", "torchmetrics"}


def test_another_file_than_the_locks_is_refused(checkout):
    digest = sha256((checkout / "wheels" / "leaf-1-py3-none-any.whl").read_bytes()).hexdigest()
    asked = "leaf==1 \\\n    --hash=sha256:{}\n"
    refused = install(checkout, hashed=asked.format("0" * 64), pinned="")
    assert refused.returncode == 2
    assert digest in refused.stderr  # pip names both
    assert refused.stderr.splitlines()[-1].startswith("tools/venv.sh: error: .venv is not complete")
    assert not list(checkout.glob(".venv/**/leaf*")) and not (checkout / ".venv/installed").exists()
    done = install(checkout, hashed=asked.format(digest))
    assert done.returncode == 0, done.stderr
    found = {path.name for path in checkout.glob(".venv/**/*.dist-info")}
    assert {"leaf-1.dist-info", "mine-1.dist-info"} <= found
    assert install(checkout).stdout == ""  # nothing to do
    changed = install(checkout, hashed="")
    assert changed.returncode == 2 and "run: make lock" in changed.stderr


@pytest.mark.parametrize("where", ["variables", "file"])
def test_pips_settings_do_not_install_elsewhere(checkout, tmp_path, where):
    """What else they set counts: here the place of the wheels."""
    elsewhere = str(tmp_path / "elsewhere")
    settings = {"user": "1", "target": elsewhere, "prefix": elsewhere}
    if where == "file":
        wheels = (checkout / "wheels").as_uri()
        lines = [f"{name} = {value}" for name, value in settings.items()]
        text = "\n".join(["[global]", f"find-links = {wheels}", "[install]", *lines])
        (tmp_path / "pip.conf").write_text(text)
        environ = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": ""}
    else:
        environ = {f"PIP_{name.upper()}": value for name, value in settings.items()}
    digest = sha256((checkout / "wheels" / "leaf-1-py3-none-any.whl").read_bytes()).hexdigest()
    done = install(checkout, environ, hashed=f"leaf==1 \\\n    --hash=sha256:{digest}\n", pinned="")
    assert done.returncode == 0, done.stderr
    assert (
        "pip's settings that install elsewhere do not count here: prefix target user" in done.stdout
    )
    assert len(list(checkout.glob(".venv/**/leaf-1.dist-info"))) == 1
    assert not Path(elsewhere).exists()
