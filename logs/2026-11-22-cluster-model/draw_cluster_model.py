"""Draws the pictures of docs/cluster_model.md with the simulator: draw_cluster_model.py DIR."""

import sys
from dataclasses import replace
from pathlib import Path

from bert_tools.plan.cluster.ablation import ablation
from bert_tools.plan.cluster.calibration import compare, published_steps
from bert_tools.plan.cluster.constants import default_constants
from bert_tools.plan.cluster.plot import (
    ablation_picture,
    calibration_picture,
    sweep_picture,
    timeline_picture,
)
from bert_tools.plan.cluster.question import Question, answer
from bert_tools.plan.cluster.sweep import sweep
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.data.length_histogram import wikipedia_lengths

PAPER = Question(
    nodes=128,
    gpus_per_node=8,
    local_batch_size=16,
    sampler="strata_6_3_2_5",
    balance="presort_local",
    recipe="open_adam",
)
AS_PUBLISHED = replace(
    PAPER, program="samsung_v2_0", precision="fp16", balance="exchange_local", node_gb_s=100.0
)
SMALL = Question(nodes=128, gpus_per_node=8, local_batch_size=4)


def main() -> None:
    """Write five PNG files into the directory."""
    out = Path(sys.argv[1])
    constants = default_constants()
    index = SampleIndex.of_histogram(wikipedia_lengths(), "Wikipedia's lengths", 76)
    for name, question in {"published": AS_PUBLISHED, "captured": PAPER}.items():
        found = answer(question, index, constants)
        (out / f"cluster_timeline_{name}.png").write_bytes(timeline_picture(found))
        if name == "captured":
            rows = ablation(found, index, constants)
            (out / "cluster_techniques.png").write_bytes(ablation_picture(found, rows))
    series = {
        "closed LAMB, 4 a GPU": list(sweep(SMALL, "local", index, constants)),
        "closed LAMB, global batch 4,096": list(sweep(SMALL, "global", index, constants)),
        "open Adam, global batch 16,384": list(sweep(PAPER, "global", index, constants)),
    }
    (out / "cluster_sizes.png").write_bytes(sweep_picture(series))
    compared = [compare(step, constants) for step in published_steps()]
    (out / "cluster_calibration.png").write_bytes(calibration_picture(compared))


if __name__ == "__main__":
    main()
