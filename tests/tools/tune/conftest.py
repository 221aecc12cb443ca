"""A config, a space and data for studies whose trainer is `fake_trainer.py`."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from support import TINY_CONFIG

FAKE = Path(__file__).with_name("fake_trainer.py")
SPACE = """
[[parameter]]
key = "optim.learning_rate"
low = 1e-4
high = 1e-1
scale = "log"
"""


@pytest.fixture
def study_words(tmp_path):
    """The words of a `tune` command on a fake trainer: 20 evaluations at most, target 0.5."""
    config, space, data = tmp_path / "tiny.toml", tmp_path / "space.toml", tmp_path / "data"
    text = TINY_CONFIG.replace("interval_samples = 160", "interval_samples = 32")
    config.write_text(text.replace("target_accuracy = 0.99", "target_accuracy = 0.5"))
    space.write_text(SPACE)
    for part in ("train", "eval"):
        (data / part / "index").mkdir(parents=True)
        (data / part / "index" / "dataset.json").write_text(part)

    def words(mode="quick", study="study", **options):
        given = {
            "config": config,
            "space": space,
            "data": data,
            "out": tmp_path / study,
            "samples": 640,
            "trials": 6,
            "trainer": shlex.join([sys.executable, str(FAKE), mode]),
            **options,
        }
        chosen = [(f"--{key}", str(value)) for key, value in given.items() if value is not None]
        return ["tune", *(word for pair in chosen for word in pair)]

    return words


@pytest.fixture
def studied(study_words, capsys):
    """A study's result.json; status None allows a reached and a missed target.

    Of a mistake (status 2) the last line of stderr. `more` words follow those of the options.
    """

    def of(mode="quick", *, status=0, more=(), **options):
        words = [*study_words(mode, **options), *more]
        assert main(words) in ((0, 3) if status is None else (status,))
        said = capsys.readouterr()
        if status != 2:
            return json.loads((Path(words[words.index("--out") + 1]) / "result.json").read_text())
        last = said.err.strip().split("\n")[-1]
        assert last.startswith("mlperf_bert: error: ")
        return last

    return of
