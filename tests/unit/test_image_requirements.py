"""What the image's base has stays; the rest of pyproject.toml's dependencies are installed."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from support import REPOSITORY

SCRIPT = REPOSITORY / "tools" / "image_requirements.py"


def test_an_installed_package_is_kept_in_its_version(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["pytest>=9999", "not-there[x]>=2,<3"]\n')
    command = [sys.executable, SCRIPT, project]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "requirements.txt").read_text() == "not-there[x]>=2,<3\n"
    assert (tmp_path / "constraints.txt").read_text() == f"pytest=={version('pytest')}\n"
    assert f"kept from the base image: pytest=={version('pytest')}\n" in done.stdout
