"""SPACE.toml: what is drawn lies in it, what is wrong in it is named in one line."""

import json

import pytest

from bert_tools.tune.space import draw, read_space
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import ConfigError
from support import CONFIGS, TOOLS

SHIPPED = sorted((TOOLS / "tune" / "spaces").glob("*.toml"))


class Ends:
    """Draws the lowest, or the highest, of everything, and notes what it was asked for."""

    def __init__(self, end):
        self.end = end
        self.asked = []

    def suggest_float(self, name, low, high, *, log):
        assert 0 < low < high or not log
        self.asked.append(name)
        return (low, high)[self.end]

    def suggest_int(self, name, low, high, *, log):
        assert low < high
        self.asked.append(name)
        return (low, high)[self.end]

    def suggest_categorical(self, name, choices):
        self.asked.append(name)
        return choices[-self.end]


@pytest.fixture(scope="module")
def config():
    """A rate of 2e-3, a beta_2 of 0.98, and a warm-up of 200 steps."""
    return load_config(CONFIGS / "encoder_cpu_tiny.toml")


def parameter(key, **entries):
    """A table of SPACE.toml; JSON's values are TOML's as well, but for tables."""
    when = entries.pop("when", None)
    lines = [f"{name} = {json.dumps(value)}" for name, value in entries.items()]
    lines += [f"when = {{ {json.dumps(k)} = {json.dumps(v)} }}" for k, v in (when or {}).items()]
    return "\n".join(["[[parameter]]", f'key = "{key}"', *lines, ""])


RATE, WARM_UP = "optim.learning_rate", "schedule.warmup_steps"


@pytest.fixture
def drawn(tmp_path, config):
    """What is drawn of tables by somebody who suggests, or at an end."""

    def of(suggests, *tables):
        path = tmp_path / "space.toml"
        path.write_text("".join(tables), encoding="utf-8")
        suggests = Ends(suggests) if isinstance(suggests, int) else suggests
        return draw(read_space(path, config), suggests, config)

    return of


def test_ends_are_the_files(drawn):
    tables = (
        parameter(RATE, low=1e-4, high=1e-2, scale="log"),
        parameter(WARM_UP, low=10, high=90),
        parameter("clip.policy", choices=["none", "after_allreduce"]),
        parameter("optim.beta_2", low=0.9, high=0.9995, scale="log_below_one"),
    )
    keys = (RATE, WARM_UP, "clip.policy", "optim.beta_2")
    assert [drawn(end, *tables) for end in (0, 1)] == [
        dict(zip(keys, (1e-4, 10, "none", 0.9995), strict=True)),
        dict(zip(keys, (1e-2, 90, "after_allreduce", 0.9), strict=True)),
    ]


def test_factors_of_the_config(drawn):
    tables = (
        parameter(RATE, low=0.5, high=2.0, of="config"),
        parameter(WARM_UP, low=0.25, high=2, of="config"),
    )
    low, high = (drawn(end, *tables) for end in (0, 1))
    assert low == {RATE: 1e-3, WARM_UP: 50} and high == {RATE: 4e-3, WARM_UP: 400}
    assert type(low[WARM_UP]) is int


def test_integers_as_ends_of_a_number_leave_it_a_number(drawn):
    class Middle(Ends):
        def suggest_float(self, name, low, high, *, log):
            return (low + high) / 2

    text = parameter("optim.weight_decay", low=0, high=1)
    assert drawn(Middle(0), text) == {"optim.weight_decay": 0.5}


def test_conditions_on_the_config(drawn):
    table = parameter(RATE, low=0.001, high=0.002, when={"optim.name": "adamw"})
    assert drawn(0, table) == {RATE: 0.001}


def test_conditions_choose_the_range(drawn):
    tables = (
        parameter("optim.name", choices=["adamw", "lamb"]),
        parameter(RATE, low=0.001, high=0.002, when={"optim.name": "adamw"}),
        parameter(RATE, low=0.01, high=0.02, when={"optim.name": "lamb"}),
        parameter("clip.max_norm", low=1.0, high=2.0, when={"optim.name": "muon"}),
    )
    assert drawn(0, *tables) == {"optim.name": "adamw", RATE: 0.001}
    assert drawn(1, *tables) == {"optim.name": "lamb", RATE: 0.02}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["cpu_tiny.toml", "open_adamw_dgxa100_128x8x4x1.toml"])
def test_ours_fit_configs_of_any_size(path, name):
    config = load_config(CONFIGS / name)
    space = read_space(path, config)
    for end in (0, 1):
        ends = Ends(end)
        assert draw(space, ends, config)
        assert len(ends.asked) == len(set(ends.asked))


BETA = "optim.beta_1"
MISTAKES = (
    ("", "[[parameter]]"),
    ("[other]\n", "other"),
    ("[[parameter]]\nlow = 1\nhigh = 2\n", "key is"),
    (f'[[parameter]]\nkey = "{BETA}"\nlow = 0.9\nhigh = nan\n', "high must be a number, not nan"),
    (parameter("eval.target_accuracy", low=0.1, high=0.2), "what is measured"),
    (parameter("run.seed", low=1, high=2), "what is measured"),
    (parameter("optim.rate", low=1, high=2), "unknown setting"),
    (parameter(BETA, low=1), "high must be a number, not None"),
    (parameter(BETA, low=0.9, high=0.8), "not below"),
    (parameter(BETA, low=0.0, high=0.8, scale="log"), "above 0"),
    (parameter(BETA, low=0, high=1.0, scale="log_below_one"), "one"),
    (parameter(BETA, low=0.1, high=0.8, size=2), "unknown key"),
    (parameter("optim.name", choices=["sgd"]), "'adamw', 'lamb' or 'muon'"),
    (parameter("optim.name", choices=[]), "must be a list"),
    (parameter(WARM_UP, low=0.5, high=2.5), "an integer"),
    (parameter(BETA, low=0.1, high=0.8) * 2, "two ranges"),
    (parameter("schedule.start_warmup_step", low=-9, high=0, scale="log_below_one"), "one"),
    (parameter("schedule.start_warmup_step", low=1, high=2, of="config"), "above 0"),
    (parameter(RATE, low=0.5, high=2.0, of="Config"), "unknown of = 'Config'"),
    (parameter(RATE, low=0.5, high=2.0, of=["config"]), "unknown of = "),
    (
        parameter(RATE, low=0.1, high=0.2, when={"optim.name": "lamb"})
        + parameter("optim.name", choices=["adamw", "lamb"]),
        "parameter 1: is never searched, because optim.name is never 'lamb'",
    ),
)


def test_mistakes_are_named(drawn):
    for text, named in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            drawn(0, text)
        assert named in str(caught.value) and "\n" not in str(caught.value)
