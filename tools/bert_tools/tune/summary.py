"""Results of a study: result.json, and best.toml if a trial reached the target."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bert_tools.tune.study import (
    How,
    StudySettings,
    best_trial,
    ended_trials,
    ending_of,
    in_words,
    with_values,
)
from mlperf_bert.config.files import config_from_tables, config_to_toml
from mlperf_bert.errors import one_line
from mlperf_bert.files import write_file, write_json

if TYPE_CHECKING:
    from optuna import Study

SUMMARY_SCHEMA_VERSION = 3
ENDINGS: tuple[How, ...] = get_args(How)


def summarise(study: "Study", settings: StudySettings) -> dict[str, Any]:
    """The summary for `--json` and result.json."""
    ended = ended_trials(study)
    counts = Counter(ending_of(each).how for each in ended)
    facts: dict[str, Any] = {
        "schema_version": SUMMARY_SCHEMA_VERSION,
        "objective": settings.objective,
        "target_accuracy": settings.target,
        "most_samples": settings.most_samples,
        "eval_interval_samples": settings.config.eval_interval_samples,
        "trial_seed": settings.seed,
        "trials": {ending: counts[ending] for ending in ENDINGS},
        "samples_trained": sum(ending_of(each).samples for each in ended),
        "best": None,
    }
    best = best_trial(study)
    if best is not None:
        ending = ending_of(best)
        facts["best"] = {
            "trial": best.number,
            "settings": best.user_attrs["settings"],
            "samples": ending.samples,
            "seconds": ending.seconds,
        }
    return facts


def write_results(
    directory: Path, study: "Study", settings: StudySettings, facts: dict[str, Any]
) -> None:
    """Write both files. Raises DataError if one cannot be written."""
    write_file(directory / "result.json", write_json(facts))
    best = best_trial(study)
    if best is None:
        return
    # Seed, length of the run and checkpoints are those of the given config.
    tuned = config_from_tables(with_values(settings.config, best.user_attrs["settings"]), "best")
    lines = (
        f"Found by mlperf_bert tune: trial {best.number}, {in_words(best, settings.objective)} to "
        f"accuracy {settings.target:g} with seed {settings.seed}.",
        f"Begun from {settings.config_path.name}. Searched: "
        f"{', '.join(best.user_attrs['settings'])}.",
    )
    comments = "".join(f"# {one_line(line)}\n" for line in lines)
    write_file(directory / "best.toml", f"{comments}\n{config_to_toml(tuned)}".encode())


def summary_in_words(facts: dict[str, Any]) -> str:
    """The trials by ending in one line, and the best in another."""
    counts = ", ".join(f"{count} {ending}" for ending, count in facts["trials"].items())
    line = f"trials: {counts}; {facts['samples_trained']:,} samples trained"
    best = facts["best"]
    if best is None:
        return f"{line}\nno trial reached the target: widen the space, or raise --samples"
    values = ", ".join(f"{key} = {value}" for key, value in best["settings"].items())
    needed = f"{best['samples']:,} samples, {best['seconds']:,.1f} s"
    return f"{line}\nbest: trial {best['trial']}, {needed}: {values}"
