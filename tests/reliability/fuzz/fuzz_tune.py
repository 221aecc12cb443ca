"""What `tune` reads of anybody's: a space, drawn from at both ends, and a study's journal."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_mutations import mutate_lines, mutate_toml
from fuzz_parser import Parser

from bert_tools.tune.settings import with_values
from bert_tools.tune.space import draw, read_space, space_as_json, space_for
from bert_tools.tune.store import as_record, check_journal, open_journal
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from support import CONFIGS, TOOLS

SPACE = "space.toml"
JOURNAL = "journal.log"


class Ends:
    """Draws the lowest or the highest of everything."""

    def __init__(self, end: int) -> None:
        self.end = end

    def suggest_float(self, _name: str, low: float, high: float, *, log: bool) -> float:
        assert low < high and (low > 0 or not log)
        return (low, high)[self.end]

    def suggest_int(self, _name: str, low: int, high: int, *, step: int, log: bool) -> int:
        assert low < high and step >= 1 and (low > 0 or not log)
        return (low, high)[self.end]

    def suggest_categorical(self, _name: str, choices: tuple[Any, ...]) -> Any:
        return choices[-self.end]


def make_space(directory: Path) -> None:
    """Every form of a parameter."""
    shipped = (TOOLS / "tune" / "spaces" / "optimizers.toml").read_text()
    stepped = '\n[[parameter]]\nkey = "schedule.decay_steps"\nlow = 100\nhigh = 900\nstep = 100\n'
    (directory / SPACE).write_text(shipped + stepped)


@cache
def config() -> RunConfig:
    """What the space is around."""
    return load_config(CONFIGS / "cpu_tiny.toml")


def parse_space(directory: Path) -> object:
    """As `tune`, to the values of a trial."""
    space = space_for(read_space(directory / SPACE), config(), None)
    json.dumps(space_as_json(space))
    return [draw(space, Ends(end), config()) for end in (0, 1)]


def make_journal(directory: Path) -> None:
    """A study of three trials, as Optuna writes it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_journal(directory / JOURNAL)
    study = optuna.create_study(storage=storage, study_name="trial")
    for number in range(3):
        trial = study.ask()
        rate = trial.suggest_float("optim.learning_rate", 1e-4, 1e-2, log=True)
        trial.suggest_categorical("clip.policy", ["none", "after_allreduce"])
        facts = {"owner": {"host": "here", "pid": 7}, "settings": {"clip.policy": "none"}}
        facts |= {"seed": 1, "ended": "reached", "samples": 64, "seconds": 0.5}
        facts |= {"accuracies": [0.25, 0.5], "evaluated_at": [32, 64]}
        for key, fact in facts.items():
            trial.set_user_attr(key, fact)
        trial.report(0.5, number + 1)
        study.tell(trial, rate)


def parse_journal(directory: Path) -> object:
    """As `tune`, on a copy: what is read may be mended."""
    check_journal(directory / JOURNAL)
    copy = directory / "copy.log"
    copy.write_bytes((directory / JOURNAL).read_bytes())
    storage = open_journal(copy)
    studies = storage.get_all_studies()
    records = [
        as_record(each.study_name, trial)
        for each in studies
        for trial in storage.get_all_trials(each._study_id)
    ]
    return [with_values(config(), each.settings) for each in records]


TUNE_PARSERS: Mapping[str, Parser] = {
    "tune_space": Parser(make=make_space, targets={SPACE: mutate_toml}, parse=parse_space),
    "tune_journal": Parser(
        make=make_journal, targets={JOURNAL: mutate_lines("")}, parse=parse_journal, inputs=20_000
    ),
}
