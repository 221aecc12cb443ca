"""The fixtures in tests/data/tensorflow are what the real TensorFlow writes anew.

Needs a package index, 3 GB below the temporary directory, 5 GB of memory, and five minutes.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bert_tools.convert.tensorflow import open_tensorflow
from support import REPOSITORY
from tensorflow_cases import FIXTURES, SCORES, V2, V2_SHARDS

pytestmark = [pytest.mark.longest, pytest.mark.timeout(2400)]
MAKERS = REPOSITORY / "tests" / "convert_fixtures"
NAMES = {path.relative_to(FIXTURES) for path in FIXTURES.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tensorflow_python(tmp_path_factory):
    """The interpreter of an environment with the real TensorFlow."""
    folder = tmp_path_factory.mktemp("tensorflow")
    python = folder / "environment" / "bin" / "python"
    _run(sys.executable, "-m", "venv", folder / "environment")
    _run(python, "-m", "pip", "install", "--quiet", "tensorflow-cpu==2.21.0")
    return python


def _run(*command, **environ):
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _make(python, script, *arguments):
    _run(python, MAKERS / script, *arguments, PYTHONPATH=str(REPOSITORY / "tests"))


def test_the_fixtures_are_what_tensorflow_writes(tensorflow_python, tmp_path):
    anew = tmp_path / "fixtures"
    anew.mkdir()
    _make(tensorflow_python, "make_tensorflow_fixtures.py", anew)
    assert {path.relative_to(anew) for path in anew.rglob("*") if path.is_file()} == NAMES
    for path in (V2, V2_SHARDS):
        assert_same_tensors(anew / path.relative_to(FIXTURES), path)
    found, expected = np.load(anew / SCORES.name), np.load(SCORES)
    assert found.files == expected.files
    for name in expected.files:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12)


def test_bert_large_is_read_in_the_memory_of_one_tensor(tensorflow_python, tmp_path):
    _make(tensorflow_python, "make_large_checkpoint.py", tmp_path / "model.ckpt")
    found = json.loads(_run(sys.executable, MAKERS / "read_checkpoint.py", tmp_path / "model.ckpt"))
    assert (found["tensors"], found["gigabytes"]) == (398, 1.345)
    assert found["largest_mib"] <= found["growth_mib"] < 1.5 * found["largest_mib"]
    for path in tmp_path.iterdir():
        path.unlink()


def assert_same_tensors(found_in, expected_in):
    found, expected = open_tensorflow(found_in), open_tensorflow(expected_in)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        if tensor.dtype == "float32":
            assert found[name].read().tobytes() == tensor.read().tobytes(), name
