"""What measuring and predicting share, without torch: BERT's phases, and a block's steps."""

from pathlib import Path

from bert_tools.plan.buckets import backward_order
from mlperf_bert.config.sections import ModelSection

BASE = Path(__file__).with_name("base.toml")
STEPS = 4  # timed steps of a block, after one that is not
TYPICAL_TOKENS, TYPICAL_MASKED = 234, 35
BACKWARD = 2  # times the forward


def phase_of(name: str, num_layers: int) -> int:
    """The forward's phase of a parameter: 0 embeddings, then layers, last the heads."""
    if name.startswith("bert.encoder.layer."):
        return 1 + int(name.split(".")[3])
    return 0 if name.startswith("bert.embeddings") else num_layers + 1


def phase_shares(model: ModelSection) -> list[float]:
    """Each phase's share of the work, in the forward's order; their sum is 1."""
    shares, before = [0.0] * (model.num_layers + 2), 0.0
    for gradient in backward_order(model, "separate", TYPICAL_TOKENS, TYPICAL_MASKED):
        shares[phase_of(gradient.name, model.num_layers)] += gradient.ready_at - before
        before = gradient.ready_at
    return shares
