"""The tables of this comparison, made again from its records.

.venv/bin/python logs/2026-11-22-squad/table.py > logs/2026-11-22-squad/table.md
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bert_tools.squad.comparison import RESULT, Conditions, RunRecord, compare_runs, read_run
from bert_tools.squad.table import in_words

HERE = Path(__file__).parent
ENGINES = ("single", "ddp_2", "fsdp_2", "pipeline_2", "pipeline_4", "pipeline_2xddp_2")


def records() -> Iterator[RunRecord]:
    """Every run, engine by engine; each is read from a directory of its own, as where it ran."""
    for engine in ENGINES:
        for path in sorted((HERE / "records").glob(f"{engine}-*.json")):
            with tempfile.TemporaryDirectory() as place:
                (Path(place) / RESULT).write_bytes(path.read_bytes())
                yield read_run(Path(place))


if __name__ == "__main__":
    peak = json.loads((HERE / "peak.json").read_bytes())
    conditions = Conditions(initial_batch=16, peak_tflops=peak["tflops"], peak_means=peak["means"])
    print(in_words(compare_runs(list(records()), conditions)))
