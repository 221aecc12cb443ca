"""The fixtures in tests/data/tensorflow are what the real TensorFlow writes anew.

Needs a package index, 2 GB below the temporary directory, and five minutes.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from bert_tools.convert.tensorflow import open_tensorflow
from support import REPOSITORY
from tensorflow_cases import FIXTURES, SCORES, V2, V2_SHARDS

MAKER = REPOSITORY / "tests" / "convert_fixtures" / "make_tensorflow_fixtures.py"


def run(*command, **environ):
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def names(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.longest
@pytest.mark.timeout(2400)
def test_the_fixtures_are_what_tensorflow_writes(tmp_path):
    python, anew = tmp_path / "environment" / "bin" / "python", tmp_path / "fixtures"
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    run(python, "-m", "pip", "install", "--quiet", "tensorflow-cpu==2.21.0")
    anew.mkdir()
    run(python, MAKER, anew, PYTHONPATH=str(REPOSITORY / "tests"))
    assert names(anew) == names(FIXTURES)
    for path in (V2, V2_SHARDS):
        found, expected = open_tensorflow(anew / path.relative_to(FIXTURES)), open_tensorflow(path)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            if tensor.dtype == "float32":
                assert found[name].read().tobytes() == tensor.read().tobytes(), name
    found, expected = np.load(anew / SCORES.name), np.load(SCORES)
    assert found.files == expected.files
    for name in expected.files:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12)
