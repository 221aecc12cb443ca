"""Trees of MLPerf logs in the layout of its result repositories, written by our own emitter."""

import json

from bert_tools.common.log_reader import TOKEN
from support import mlperf_records


def write_system(root, system, *, minutes, samples, nodes=1, says_ranks=False):
    """The runs of one system, below results/, and its description, below systems/."""
    directory = root / "results" / system / "bert"
    directory.mkdir(parents=True)
    (root / "systems").mkdir(exist_ok=True)
    description = {
        "submitter": "Acme",
        "division": "closed",
        "system_name": system,
        "number_of_nodes": str(nodes),
        "accelerators_per_node": "8",
        "accelerator_model_name": "Example A1",
    }
    (root / "systems" / f"{system}.json").write_text(json.dumps(description))
    ranks = 8 * nodes if says_ranks else None
    for number, time in enumerate(minutes):
        write_run(directory / f"result_{number}.txt", time, samples, ranks=ranks)
    return directory


def write_run(path, minutes, samples, *, ranks=None, status="success", **facts):
    """One run that trains on so many samples in so many minutes."""
    from mlperf_bert.run.mlperf_log import MlperfLog

    log = MlperfLog(path)
    log.run_start()
    log.eval_accuracy(samples, 0.7201)
    log.run_stop(samples, 10_000, status)
    log.close()
    records = mlperf_records(path)
    start = next(each["time_ms"] for each in records if each["key"] == "run_start")
    records[-1]["time_ms"] = start + round(minutes * 60_000)
    facts |= {"submission_benchmark": "bert", "submission_division": "closed"}
    facts |= {"submission_org": "Acme", "global_batch_size": 448}
    facts |= {} if ranks is None else {"number_of_ranks": ranks}
    first = [
        {"namespace": "", "time_ms": start, "event_type": "POINT_IN_TIME", "key": key}
        | {"value": value, "metadata": {}}
        for key, value in facts.items()
    ]
    lines = [f"{TOKEN}{json.dumps(record)}\n" for record in [*first, *records]]
    path.write_text("".join(lines), encoding="ascii")
