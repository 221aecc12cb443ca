"""Times the cluster simulator itself: one step of 1,024 and of 100,000 ranks, 16 sequences each."""

import time

from bert_tools.plan.cluster.machine import default_constants
from bert_tools.plan.cluster.simulation import Question, simulate_steps
from bert_tools.plan.sample_index import wikipedia_index


def main() -> None:
    """Print wall and processor seconds of drawing and dealing a batch, and of its step."""
    index = wikipedia_index()
    for nodes in (128, 12_500):
        question = Question(nodes=nodes, gpus_per_node=8, local_batch_size=16, draws=1)
        wall, processor = time.perf_counter(), time.process_time()
        works = question.works(index)
        drawn_wall, drawn_processor = time.perf_counter(), time.process_time()
        (timing,) = simulate_steps(question.job(default_constants()), works)
        print(
            f"{question.world_size:,} ranks, step of {timing.step_ms:.1f} ms: drawing and dealing "
            f"{drawn_wall - wall:.2f} s ({drawn_processor - processor:.2f} s of a core), the step "
            f"{time.perf_counter() - drawn_wall:.2f} s "
            f"({time.process_time() - drawn_processor:.2f} s of a core)"
        )


if __name__ == "__main__":
    main()
