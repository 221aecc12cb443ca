"""Every number of a config and of other options has a range; what is outside is one line."""

import dataclasses
import typing
from functools import partial

import pytest
import torch

from bert_tools.squad.settings import SquadSettings, parse_engine
from mlperf_bert.config.bounds import Bounds, bounds_of
from mlperf_bert.config.files import checked_setting, config_value, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.spawn import run_on_ranks
from mlperf_bert.errors import ConfigError
from mlperf_bert.model import bert
from mlperf_bert.model.bert import check_memory
from support import refusal

ENDLESS = (2**40, 2**63 - 1, 1e300, -1, 0)


def numbers_of(kind):
    """Fields that may be numbers, and of which type."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        kinds = set(typing.get_args(hint) or (hint,)) & {int, float}
        if kinds:
            (found[name],) = kinds
    return found


SECTIONS = {field.name: typing.cast(type, field.type) for field in dataclasses.fields(RunConfig)}
NUMBERS = {
    f"{section}.{name}": (number, bounds_of(kind).get(name))
    for section, kind in SECTIONS.items()
    for name, number in numbers_of(kind).items()
}


@pytest.mark.parametrize("kind", [*SECTIONS.values(), SquadSettings])
def test_no_number_is_without_bounds(kind):
    assert bounds_of(kind).keys() == numbers_of(kind).keys()
    for bounds in bounds_of(kind).values():
        assert bounds.low < bounds.high
    with pytest.raises(ConfigError, match=r"^model\.num_layers: must be from 1 to 1,000, not 0$"):
        ModelSection(num_layers=0)  # a section alone


@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_outside_is_named_with_the_range_and_the_ends_load_or_are_one_line(
    tiny_config, field
):
    number, bounds = NUMBERS[field]
    assert isinstance(bounds, Bounds)
    beyond = bounds.high + 1 if number is int else 1.001 * bounds.high
    for value in (*ENDLESS, beyond):
        # No TOML has 2^63, and a float is no integer, whatever its size.
        is_one = number is float or (isinstance(value, int) and value < 2**63)
        if bounds.low <= value <= bounds.high or not is_one:
            continue
        for check in (
            partial(load_config, tiny_config, [f"{field}={value!r}"]),
            partial(checked_setting, field, number(value), "space"),
        ):
            with pytest.raises(ConfigError) as caught:
                check()
            where, problem, _ = caught.value.args
            assert where in ("--set", "space")
            assert problem.startswith(f"{field} must be {bounds}, not ")
    for value in map(number, (bounds.low, bounds.high)):
        assert checked_setting(field, value, "here") == value
        try:
            config = load_config(tiny_config, [f"{field}={value!r}"])
        except ConfigError as error:
            assert f"must be {bounds}" not in str(error), error  # its own range is kept
            assert "\n" not in str(error)
        else:
            assert config_value(config, field) == value


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (("parallel.nodes=65536", "parallel.local_batch_size=32"), "sequences per update"),
        (
            ("parallel.local_batch_size=65536", "data.max_seq_length=65535"),
            "tokens per micro-batch",
        ),
        (("model.num_layers=1000", "model.hidden_size=16384"), "parameters"),
    ],
)
def test_products_have_bounds_too(tiny_config, settings, word):
    room = ("model.max_position_embeddings=65535", "model.num_heads=1")
    for setting in settings:
        load_config(tiny_config, (*room, setting))
    with pytest.raises(
        ConfigError, match=rf"gives [0-9,]+ {word}, but at most [0-9,]+ are possible"
    ):
        load_config(tiny_config, (*room, *settings))


@pytest.mark.parametrize("field", numbers_of(SquadSettings))
def test_numbers_of_fine_tuning_are_options(field):
    number = numbers_of(SquadSettings)[field]
    bounds = bounds_of(SquadSettings)[field]
    for value in (2**63, -1) if number is int else (1e300, float("inf"), float("nan"), -1.0):
        with pytest.raises(ConfigError) as caught:
            SquadSettings(engine=parse_engine("single"), **{field: value})
        assert caught.value.args[0] == f"--{field.replace('_', '-')}"
        assert caught.value.args[1].startswith(f"must be {bounds}, not ")


def test_a_machine_is_asked_whether_it_can_hold_them(tiny_config, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"ranks_per_node: 1,000,000 ranks need at least 250,000 GiB of"
    ):
        run_on_ranks([], 10**6)
    config = load_config(tiny_config)
    needed = 8 * config.model.num_parameters
    monkeypatch.setattr(bert, "memory_bytes", lambda: needed)
    check_memory(config, torch.device("cpu"))
    monkeypatch.setattr(bert, "memory_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"^model.hidden_size: the weights and gradients need"):
        check_memory(config, torch.device("cpu"))


@pytest.mark.parametrize("path", ["n" * 300, "d/" * 2500])
def test_a_path_that_is_too_long_is_one_line(tiny_config, capsys, path):
    for command in (
        ["config", "show", path],
        ["train", "--config", path, "--data", "d"],
        ["train", "--config", tiny_config, "--data", path],
        ["train", "--config", tiny_config, "--data", "d", "--run-dir", path],
        ["report", "page", path],
        ["verify", path],
        ["watch", path],
    ):
        refusal(capsys, *command)
