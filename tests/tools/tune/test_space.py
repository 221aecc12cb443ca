"""SPACE.toml: what is drawn lies in it, what is wrong in it is named in one line."""

from pathlib import Path
from typing import Any

import pytest

from bert_tools.tune.space import draw, read_space, space_for
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from support import CONFIGS, TOOLS

SHIPPED = sorted((TOOLS / "tune" / "spaces").glob("*.toml"))


class Ends:
    """Draws the lowest, or the highest, of everything, and notes what it was asked for."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.asked: list[str] = []

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        assert 0 < low < high or not log
        self.asked.append(name)
        return (low, high)[self.end]

    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        assert low < high and step >= 1
        self.asked.append(name)
        return (low, high)[self.end]

    def suggest_categorical(self, name: str, choices: tuple[Any, ...]) -> Any:
        self.asked.append(name)
        return choices[-self.end]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(CONFIGS / "cpu_tiny.toml")  # rate 2e-3, beta_2 0.98, warm-up 200 steps


def drawn(tmp_path: Path, config: RunConfig, text: str, end: int) -> dict[str, Any]:
    path = tmp_path / "space.toml"
    path.write_text(text, encoding="utf-8")
    return draw(space_for(read_space(path), config, None), Ends(end), config)


def test_ends_are_the_files(tmp_path: Path, config: RunConfig) -> None:
    text = """
[[parameter]]
key = "optim.learning_rate"
low = 1e-4
high = 1e-2
scale = "log"
[[parameter]]
key = "schedule.warmup_steps"
low = 10
high = 90
step = 40
[[parameter]]
key = "clip.policy"
choices = ["none", "after_allreduce"]
"""
    assert drawn(tmp_path, config, text, 0) == {
        "optim.learning_rate": 1e-4,
        "schedule.warmup_steps": 10,
        "clip.policy": "none",
    }
    assert drawn(tmp_path, config, text, 1) == {
        "optim.learning_rate": 1e-2,
        "schedule.warmup_steps": 90,
        "clip.policy": "after_allreduce",
    }


def test_factors_of_the_config(tmp_path: Path, config: RunConfig) -> None:
    text = """
[[parameter]]
key = "optim.learning_rate"
low = 0.5
high = 2.0
of = "config"
[[parameter]]
key = "schedule.warmup_steps"
low = 0.25
high = 2
of = "config"
"""
    low, high = (drawn(tmp_path, config, text, end) for end in (0, 1))
    assert low == {"optim.learning_rate": 1e-3, "schedule.warmup_steps": 50}
    assert high == {"optim.learning_rate": 4e-3, "schedule.warmup_steps": 400}
    assert type(low["schedule.warmup_steps"]) is int


def test_integers_as_ends_of_a_number_leave_it_a_number(tmp_path: Path, config: RunConfig) -> None:
    class Middle(Ends):
        def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
            return (low + high) / 2

    path = tmp_path / "space.toml"
    path.write_text('[[parameter]]\nkey = "optim.weight_decay"\nlow = 0\nhigh = 1\n')
    space = space_for(read_space(path), config, None)
    assert draw(space, Middle(0), config) == {"optim.weight_decay": 0.5}


def test_numbers_just_below_one(tmp_path: Path, config: RunConfig) -> None:
    text = """
[[parameter]]
key = "optim.beta_2"
low = 0.9
high = 0.9995
scale = "log_below_one"
"""
    ends = {drawn(tmp_path, config, text, end)["optim.beta_2"] for end in (0, 1)}
    assert ends == {0.9, 0.9995}


def test_conditions_choose_the_range(tmp_path: Path, config: RunConfig) -> None:
    text = """
[[parameter]]
key = "optim.name"
choices = ["adamw", "lamb"]
[[parameter]]
key = "optim.learning_rate"
low = 0.001
high = 0.002
when = { "optim.name" = "adamw" }
[[parameter]]
key = "optim.learning_rate"
low = 0.01
high = 0.02
when = { "optim.name" = "lamb" }
[[parameter]]
key = "clip.max_norm"
low = 1.0
high = 2.0
when = { "clip.policy" = "none" }
"""
    assert drawn(tmp_path, config, text, 0) == {"optim.name": "adamw", "optim.learning_rate": 0.001}
    assert drawn(tmp_path, config, text, 1) == {"optim.name": "lamb", "optim.learning_rate": 0.02}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["cpu_tiny.toml", "open_adamw_dgxa100_128x8x4x1.toml"])
def test_ours_fit_configs_of_any_size(path: Path, name: str) -> None:
    config = load_config(CONFIGS / name)
    space = space_for(read_space(path), config, None)
    for end in (0, 1):
        ends = Ends(end)
        assert draw(space, ends, config)
        assert len(ends.asked) == len(set(ends.asked))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "[[parameter]]"),
        ("[other]\n", "other"),
        ("[[parameter]]\nlow = 1\nhigh = 2\n", "key is"),
        ('[[parameter]]\nkey = "eval.target_accuracy"\nlow = 0.1\nhigh = 0.2\n', "its own measure"),
        ('[[parameter]]\nkey = "run.seed"\nlow = 1\nhigh = 2\n', "its own measure"),
        ('[[parameter]]\nkey = "optim.rate"\nlow = 1\nhigh = 2\n', "no such setting"),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 1\n', "high is None"),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 0.9\nhigh = 0.8\n', "not below"),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 0.9\nhigh = nan\n', "high is nan"),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 0.0\nhigh = 0.8\nscale = "log"\n', "above 0"),
        (
            '[[parameter]]\nkey = "optim.beta_1"\nlow = 0\nhigh = 1.0\nscale = "log_below_one"',
            "one",
        ),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 0.1\nhigh = 0.8\nstep = 2\n', "has a step"),
        ('[[parameter]]\nkey = "clip.max_norm"\nlow = 1\nhigh = 9\nstep = 2\n', "has a step"),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 0.1\nhigh = 0.8\nsize = 2\n', "no such entry"),
        ('[[parameter]]\nkey = "optim.name"\nchoices = ["sgd"]\n', "'adamw' or 'lamb'"),
        ('[[parameter]]\nkey = "optim.name"\nchoices = []\n', "no list"),
        ('[[parameter]]\nkey = "optim.name"\nchoices = ["lamb", "lamb"]\n', "twice"),
        ('[[parameter]]\nkey = "schedule.warmup_steps"\nlow = 0.5\nhigh = 2.5\n', "an integer"),
        ('[[parameter]]\nkey = "optim.beta_1"\nlow = 0.1\nhigh = 0.8\n' * 2, "there twice"),
        (
            '[[parameter]]\nkey = "schedule.start_warmup_step"\nlow = 1\nhigh = 2\nof = "config"',
            "above 0",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, config: RunConfig, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        drawn(tmp_path, config, text, 0)
    assert named in str(caught.value) and "\n" not in str(caught.value)
