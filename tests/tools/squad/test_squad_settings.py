"""Names of engines and settings of a run: what is read, and what is refused in one line."""

import pytest

from bert_tools.squad.settings import EngineName, SquadSettings, parse_engine
from mlperf_bert.common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("single", EngineName(kind="single")),
        ("ddp:4", EngineName(kind="ddp", replicas=4)),
        ("fsdp", EngineName(kind="fsdp", replicas=3)),
        ("pipeline:4", EngineName(kind="pipeline", stages=4, schedule="1f1b")),
        ("pipeline:2 x ddp:2", EngineName(kind="pipeline", stages=2, replicas=2, schedule="1f1b")),
        (
            "pipeline:2xddp:3@gpipe",
            EngineName(kind="pipeline", stages=2, replicas=3, schedule="gpipe"),
        ),
        (" pipeline@zero_bubble ", EngineName(kind="pipeline", stages=3, schedule="zero_bubble")),
    ],
)
def test_names_are_read(text: str, expected: EngineName) -> None:
    assert parse_engine(text, ranks=3) == expected


@pytest.mark.parametrize("text", ["single", "ddp:4", "fsdp:2", "pipeline:2", "pipeline:2xddp:3"])
def test_a_name_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_engine(text)) == text


def test_ranks_and_parts() -> None:
    assert parse_engine("pipeline:2xddp:3").ranks == 6
    assert parse_engine("pipeline:2").num_parts == 2
    assert parse_engine("pipeline:2@interleaved").num_parts == 4


REFUSED = (
    *("", "zero", "ddp:0", "single:2", "pipeline:1", "ddp:2xddp:2", "fsdp:2@gpipe", "ddp:-1"),
    *("pipeline:2@fifo", "pipeline:2xfsdp:2", "pipeline:2xddp:0", "ddp:99999"),
)


@pytest.mark.parametrize("text", REFUSED)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine: "):
        parse_engine(text)


@pytest.mark.parametrize(
    ("engine", "changes", "option"),
    [
        ("single", {"microbatches": 3}, "--microbatches"),  # does not divide 16
        ("single", {"microbatches": 0}, "--microbatches"),
        ("ddp:3", {}, "--microbatches"),  # 4 over 3 ranks
        ("pipeline:4", {"microbatches": 2}, "--microbatches"),  # 1F1B needs one a stage
        ("pipeline:2xddp:2", {"noise_every": 5, "microbatches": 2}, "--microbatches"),
        ("single", {"noise_every": 5, "microbatches": 1}, "--microbatches"),
        ("pipeline:2@interleaved", {"microbatches": 8, "global_batch": 24}, None),
        ("pipeline:4@interleaved", {"microbatches": 9, "global_batch": 18}, "--microbatches"),
        ("single", {"learning_rate": float("nan")}, "--learning-rate"),
        ("single", {"dropout": 1.0}, "--dropout"),
        ("single", {"warmup": -0.1}, "--warmup"),
        ("single", {"epochs": 0.0}, "--epochs"),
        ("single", {"epochs": float("inf")}, "--epochs"),
        ("single", {"epsilon": -1.0}, "--epsilon"),
        ("single", {"updates": 0}, "--updates"),
    ],
)
def test_settings_that_cannot_run(
    engine: str, changes: dict[str, object], option: str | None
) -> None:
    def make() -> SquadSettings:
        return SquadSettings(engine=parse_engine(engine), **changes)  # type: ignore[arg-type]

    if option is None:
        make()
        return
    with pytest.raises(ConfigError, match=option):
        make()


def test_updates_of_epochs_are_rounded_up() -> None:
    settings = SquadSettings(engine=parse_engine("single"), epochs=2.0)
    assert settings.num_updates(100) == 13  # 200 windows in batches of 16
    assert settings.num_updates(1) == 1


def test_a_plan_that_fills_the_memory_is_refused() -> None:
    settings = SquadSettings(engine=parse_engine("single"), updates=10**7)
    with pytest.raises(ConfigError, match="--updates, --epochs: are 10,000,000 of 16"):
        settings.num_updates(100)
