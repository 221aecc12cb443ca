"""The settings and the surroundings of runs side by side, and in which of them they differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_tools.report.facts import RunFacts
from mlperf_bert.config.files import config_to_tables

_OF_EACH_RUN = ("utc", "seed")  # surroundings that always differ


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: its name, and its value in each run in words, None where it has none."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """Whether two runs that have it have it otherwise, or only some have it."""
        return len(set(self.values)) > 1


def setting_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """All settings of the configs, as `section.field`; of a log those that it tells."""
    return _rows([_settings(each) for each in runs])


def environment_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """All facts of `environment.json`."""
    return _rows([each.environment for each in runs])


def differences(runs: Sequence[RunFacts]) -> list[Row]:
    """Settings, and facts of the surroundings, in which the runs that tell them differ."""
    rows = [row for row in setting_rows(runs) if row.differs]
    facts = [row for row in environment_rows(runs) if row.name not in _OF_EACH_RUN]
    rows += [Row(f"environment: {row.name}", row.values) for row in facts if row.differs]
    return [row for row in rows if None not in row.values or _is_told(row, runs)]


def _is_told(row: Row, runs: Sequence[RunFacts]) -> bool:
    """Whether a value that is not there is so because the run has none, not because its file is
    missing.
    """
    of_config = not row.name.startswith("environment: ")
    there = [each.run.config is not None if of_config else bool(each.environment) for each in runs]
    known = {value for value, told in zip(row.values, there, strict=True) if told}
    known |= {value for value in row.values if value is not None}
    return len(known) > 1


def _settings(facts: RunFacts) -> dict[str, str]:
    if facts.run.config is None:
        known = {
            "parallel.global_batch_size": facts.run.global_batch_size,
            "optim.name": facts.run.optimizer,
            "eval.target_accuracy": facts.run.target_accuracy,
        }
        return {name: str(value) for name, value in known.items() if value is not None}
    tables = config_to_tables(facts.run.config)
    found = {
        f"{section}.{field}": str(value)
        for section, table in tables.items()
        for field, value in table.items()
    }
    return found | {"parallel.global_batch_size": str(facts.run.global_batch_size)}


def _rows(columns: Sequence[Mapping[str, str]]) -> list[Row]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(column.get(name) for column in columns)) for name in names]
