"""Writes what a study found: best configs with where they came from, table, pictures, result.json.

Each file is replaced as a whole, so that several processes may write the same ones.
"""

import hashlib
from pathlib import Path

from bert_tools.tune.pictures import history_picture, importance_picture
from bert_tools.tune.settings import StudySettings, with_values
from bert_tools.tune.standing import in_words
from bert_tools.tune.store import TrialRecord
from bert_tools.tune.summary import ArmSummary, Summary
from bert_tools.tune.text import table, verdict
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import DataError, one_line
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.config.files import config_from_tables, config_to_toml


def write_results(directory: Path, summary: Summary) -> None:
    """Write all files. Raises DataError where one cannot be written."""
    write_file(directory / "result.json", write_json(summary.as_json()))
    write_file(
        directory / "table.md", f"{table(summary)}\n{verdict(summary, summary.best_arm)}\n".encode()
    )
    write_file(directory / "history.png", history_picture(summary))
    importance = importance_picture(summary)
    if importance is not None:
        write_file(directory / "importance.png", importance)
    for arm in summary.arms:
        if arm.best is None:
            continue
        text = best_toml(summary, arm, directory)
        if len(summary.arms) > 1:
            write_file(directory / f"best_{arm.name}.toml", text.encode())
        if arm.name == summary.best_arm:
            write_file(directory / "best.toml", text.encode())


def best_toml(summary: Summary, arm: ArmSummary, directory: Path) -> str:
    """The best trial's config, complete, below comments that say where it came from.

    Seed, length of the run and what is saved are those of the config that was given.
    """
    assert arm.best is not None
    settings, best = summary.settings, arm.best
    config = next(each.config for each in settings.arms if each.name == arm.name)
    tuned = config_from_tables(with_values(config, best.settings), "best")
    searched = ", ".join(best.settings) or "nothing"
    lines = [
        f"Found by mlperf_bert tune: trial {best.number} of arm {arm.name}, "
        f"{in_words(best, settings.objective)} to accuracy "
        f"{config.eval.target_accuracy:g} with seed {best.seed}.",
        f"Begun from {settings.config_path.name} over {settings.space_name}; sha256 of the "
        f"complete config begins with {_digest_of(settings)}.",
        f"Searched: {searched}. Commit: {_commit_of(best, directory)}.",
    ]
    lines.append(f"{verdict(summary, arm.name)}.")
    comments = "".join(f"# {one_line(line)}\n" for line in lines)
    return f"{comments}\n{config_to_toml(tuned)}"


def _commit_of(trial: TrialRecord, directory: Path) -> str:
    """As the training itself noted it."""
    path = directory / "trials" / trial.directory_name / "run_0" / "environment.json"
    try:
        return read_record(path, missing="is missing", remedy="").text("commit")
    except DataError:
        return "unknown"


def _digest_of(settings: StudySettings) -> str:
    """Of the complete config that the study began from, --set included, as `config` prints it."""
    return hashlib.sha256(config_to_toml(settings.config).encode()).hexdigest()[:16]
