"""Every parser on hostile files: only our own errors come out, one clean line each, and no hang."""

from pathlib import Path

import pytest
from fuzz_parsers import PARSERS
from fuzz_regressions import REGRESSIONS
from fuzz_run import INPUTS, MOST_GROWTH_MIB, RUNS_OF_ONE, limited_memory
from fuzz_world import World
from hypothesis import given, settings

FEW = 200
FEWEST = 40  # of a parser that is slow


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """A world for each parser."""
    return {name: World(PARSERS[name], tmp_path_factory.mktemp(name)) for name in PARSERS}


@pytest.mark.parametrize("name", PARSERS)
def test_only_our_own_errors_come_out(worlds: dict[str, World], name: str) -> None:
    world = worlds[name]
    inputs = max(FEWEST, FEW * world.parser.inputs // 100_000)
    accepted = 0

    @settings(RUNS_OF_ONE, max_examples=inputs, derandomize=True)
    @given(INPUTS)
    def one(drawn: int | bytes) -> None:
        nonlocal accepted
        accepted += world.try_input(0, drawn)

    one()
    assert 0 < accepted < inputs  # mutations neither too mild nor too wild to reach what is behind


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["none", "pipe", "directory", "device", "loop"])
@pytest.mark.parametrize("name", PARSERS)
def test_what_is_no_file_is_refused(worlds: dict[str, World], name: str, kind: str) -> None:
    parser = PARSERS[name]
    for target in parser.targets:
        is_optional = kind == "none" and target in parser.optional
        with limited_memory():  # a device never ends
            assert worlds[name].replaced(target, kind) == is_optional


@pytest.mark.parametrize(("name", "target", "contents"), REGRESSIONS)
def test_what_once_failed_is_refused(
    worlds: dict[str, World], name: str, target: str, contents: bytes
) -> None:
    assert not worlds[name].accepts(target, contents)
    assert not worlds[name].accepts(target, contents, repaired=True)


def test_the_limit_of_memory_is_one() -> None:
    too_much = 2 * MOST_GROWTH_MIB * 2**20
    with limited_memory(), pytest.raises(MemoryError):
        bytearray(too_much)
    assert len(bytearray(too_much)) == too_much  # lifted again


def test_worlds_are_left_as_they_were(worlds: dict[str, World]) -> None:
    for world in worlds.values():
        now: dict[Path, bytes] = {path: path.read_bytes() for path in world.valid}
        assert now == world.valid
        assert world.is_accepted()
