"""A config, a space and data for studies whose trainer is `fake_trainer.py`."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
def study_words(tmp_path: Path) -> Callable[..., list[str]]:
    """The words of a `tune` command on a fake trainer: 20 evaluations at most, target 0.5."""
    config, space, data = tmp_path / "tiny.toml", tmp_path / "space.toml", tmp_path / "data"
    text = TINY_CONFIG.replace("interval_samples = 160", "interval_samples = 32")
    config.write_text(text.replace("target_accuracy = 0.99", "target_accuracy = 0.5"))
    space.write_text(SPACE)
    for part in ("train", "eval"):
        (data / part / "index").mkdir(parents=True)
        (data / part / "index" / "dataset.json").write_text(part)

    def words(mode: str = "quick", study: str = "study", **options: object) -> list[str]:
        given = {
            "config": config,
            "space": space,
            "data": data,
            "study": tmp_path / study,
            "samples": 640,
            "trials": 6,
            "repeats": 2,
            "trainer": f"{sys.executable} {FAKE} {mode}",
            **options,
        }
        return [
            "tune",
            *(word for key, value in given.items() for word in (f"--{key}", str(value))),
        ]

    return words
