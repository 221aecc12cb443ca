"""What Muon's matrices cost on 128 DGX A100 at 16 sequences a GPU, by the cluster simulator.

python cost.py     a Markdown table
"""

from dataclasses import replace

from bert_tools.plan.cluster.simulation import Question, simulate
from bert_tools.plan.sample_index import wikipedia_index

SHARDS = {"none": "no shards (`flat`)", "node": "`shard_node`", "world": "`shard_world`"}
ASKED = Question(nodes=128, gpus_per_node=8, local_batch_size=16, sampler="quantile", draws=2)


def main():
    """Simulate each way."""
    index = wikipedia_index()
    print("| shards | AdamW's step | Muon's step | Newton-Schulz | share | every second update |")
    print("|---|---|---|---|---|---|")
    for sharding, name in SHARDS.items():
        asked = replace(ASKED, sharding=sharding)
        adam = simulate(replace(asked, optimizer="adam"), index).run.step_ms
        found = simulate(replace(asked, optimizer="muon"), index)
        step, part = found.run.step_ms, found.parts_ms["Newton-Schulz"]
        print(
            f"| {name} | {adam:.1f} ms | {step:.1f} ms | {part:.1f} ms | {part / step:.1%} | "
            f"{part / 2 / (step - part / 2):.1%} |"
        )


if __name__ == "__main__":
    main()
