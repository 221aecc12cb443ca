"""What `squad compare` reads of anybody's: the record that a fine-tuning run leaves."""

import json
from pathlib import Path

from fuzz_mutations import mutate_json
from fuzz_parser import Parser

from bert_tools.common.figures import png
from bert_tools.squad.comparison import RESULT, Conditions, compare_runs, read_run
from bert_tools.squad.plot import goodput_figure, timeline_figure
from bert_tools.squad.table import in_words


def make_record(directory: Path) -> None:
    """A pipeline of two stages, as it leaves its record."""
    span = {"rank": 1, "stage": 1, "kind": "F", "microbatch": 0, "begin_s": 0.0, "end_s": 0.5}
    contents = {
        "schema_version": 1,
        "engine": "pipeline:2",
        "schedule": "1f1b",
        "ranks": 2,
        "stages": 2,
        "seed": 1,
        "precision": "fp32",
        "device": "cpu",
        "processor": "a processor",
        "cores": 2,
        "model": {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 99, "parameters": 12345},
        "init": "random",
        "data": {"train_sha256": "aa", "train_questions": 80, "train_windows": 80},
        "settings": {"global_batch": 16, "microbatches": 4, "dropout": 0.1},
        "updates": 2,
        "samples": 32,
        "losses": [3.0, None],
        "seconds": {"start": 1.0, "train": 4.0, "evaluate": 1.0, "end_to_end": 6.0},
        "samples_per_s": {"train": 8.0, "end_to_end": 5.3},
        "validation_loss": 2.5,
        "exact_match": 30.0,
        "f1": 40.0,
        "noise_scale": 31.5,
        "peak_memory_bytes": [2**28, 2**28],
        "cpu_seconds": [3.0, 3.0],
        "device_utilisation": [0.7, None],
        "device_utilisation_means": "process CPU time over wall time",
        "model_flops_per_s": 8e9,
        "bubble": {"measured": 0.25, "formula": 0.2},
        "timeline": [span, {**span, "kind": "B", "begin_s": 0.5, "end_s": 1.5}],
    }
    (directory / RESULT).write_text(json.dumps(contents), encoding="utf-8")


def parse_record(directory: Path) -> object:
    """As a comparison does, to its table and JSON; a few to the pictures, which take long."""
    run = read_run(directory)
    comparison = compare_runs([run], Conditions(initial_batch=8, peak_tflops=0.1))
    json.dumps(comparison.as_json())
    if run.seed > 1:
        figures = (goodput_figure(comparison), timeline_figure([run]))
        return [png(each) for each in figures if each is not None]
    return in_words(comparison)


SQUAD_RECORD = Parser(make=make_record, targets={RESULT: mutate_json}, parse=parse_record)
