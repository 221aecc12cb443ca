"""Our model is `transformers`' of its objective and architecture: logits, loss, gradients."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.modernbert import modeling_modernbert

from bert_tools.bench.baseline import padded_inputs
from mlperf_bert.config.sections import ModelSection
from model_cases import (
    MODERN,
    TINY,
    gradients,
    hugging_face_twin,
    our_loss,
    ragged_batch,
    scattered_model,
    worst_gradient_difference,
)

RAGGED = (7, 31, 12, 64, 5, 40, 33)
LARGE_WIDTH = ModelSection(
    vocab_size=510,
    num_layers=1,
    max_position_embeddings=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LONG_TEXTS = replace(MODERN, max_position_embeddings=512, attention_window=128)
# Config, lengths, and the spread of the weights in float64 and in float32.
CASES = {
    "BERT": (TINY, RAGGED, 0.2, 0.1),
    "one sequence": (TINY, (23,), 0.2, 0.1),
    "masked LM alone": (replace(TINY, objective="mlm"), RAGGED, 0.2, 0.1),
    "large width": (LARGE_WIDTH, (9, 40, 37), 0.03, 0.02),
    "modern": (MODERN, RAGGED, 0.2, 0.1),
    "modern, one sequence": (MODERN, (23,), 0.2, 0.1),
    "modern, last layer local": (replace(MODERN, num_layers=4), RAGGED, 0.2, 0.1),
    "modern, windows beyond": (replace(MODERN, attention_window=128), RAGGED, 0.2, 0.1),
    "modern, long texts": (LONG_TEXTS, (512, 65, 150), 0.2, 0.1),
}


def turned_exactly(q, k, cos, sin, unsqueeze_dim):
    """`transformers`' rotary positions without its rounding of queries and keys to float32."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k)


def compare(config, lengths, dtype, spread):
    """Differences of (logits, absolute; loss, relative; gradients, of the global norm)."""
    batch = ragged_batch(lengths, vocab_size=config.vocab_size)
    model = scattered_model(config, spread=spread, dtype=dtype)
    twin = hugging_face_twin(model)
    padded = padded_inputs(batch, batch.max_seqlen, config.architecture)
    if config.objective == "mlm":
        padded.pop("next_sentence_label", None)
    theirs = twin(**padded)
    ours = model(batch)
    scores = theirs.logits if ours.nsp is None else theirs.prediction_logits
    differences = [ours.mlm - scores[padded["labels"] != -100]]
    if ours.nsp is not None:
        differences.append(ours.nsp - theirs.seq_relationship_logits)
    logits_difference = max(float(each.detach().abs().max()) for each in differences)
    loss = our_loss(model, batch)
    their_loss = theirs.loss
    if config.architecture == "modern":  # theirs is rounded to float32
        their_loss = F.cross_entropy(scores.flatten(0, 1), padded["labels"].flatten())
    loss_difference = abs(loss.item() - their_loss.item()) / their_loss.item()
    of_ours, of_theirs = gradients(model, loss), gradients(twin, their_loss)
    assert all(gradient.any() for gradient in of_ours.values())  # none would shrink by decay alone
    gradient_difference = worst_gradient_difference(of_ours, of_theirs)
    return logits_difference, loss_difference, gradient_difference


@pytest.mark.parametrize("case", CASES)
def test_our_model_is_theirs(case, monkeypatch):
    config, lengths, spread, spread_of_float32 = CASES[case]
    with monkeypatch.context() as patch:
        patch.setattr(modeling_modernbert, "apply_rotary_pos_emb", turned_exactly)
        assert max(compare(config, lengths, torch.float64, spread)) < 1e-9
    _, loss, gradient = compare(config, lengths, torch.float32, spread_of_float32)
    assert loss < 1e-6
    assert gradient < 1e-5
