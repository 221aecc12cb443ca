"""Small models, ragged batches and `transformers`' model beside ours.

Shape letters: B sequences, S padded length, T tokens, V vocabulary, P masked positions.
"""

from dataclasses import replace

import numpy as np
import torch

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.layers import LossSums, cross_entropy_sum, pretraining_loss

CPU = torch.device("cpu")

TINY = ModelSection(
    vocab_size=99,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)

# Three layers see a window, two everything, the last among them.
MODERN = replace(
    TINY,
    architecture="modern",
    objective="mlm",
    num_layers=5,
    global_attention_every=4,
    attention_window=16,
    layer_norm_epsilon=1e-5,
)


def ragged_batch(lengths, *, vocab_size=99, masked_share=0.15, seed=0):
    """Random tokens of these lengths; denominators P and B, so that the loss is a mean.

    Word 0 is never drawn: `transformers` gives the padding word no embedding gradient.
    """
    generator = np.random.default_rng(seed)
    length = np.array(lengths)
    starts = np.concatenate(([0], np.cumsum(length)))
    position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], length)
    masked = [
        start + generator.choice(count, size=max(1, round(count * masked_share)), replace=False)
        for start, count in zip(starts, length, strict=False)
    ]
    masked_index = np.sort(np.concatenate(masked)) if masked_share else np.empty(0, np.int64)
    return UnpaddedBatch(
        input_ids=torch.from_numpy(generator.integers(1, vocab_size, starts[-1])),
        position_ids=torch.from_numpy(position_ids),
        token_type_ids=torch.from_numpy((position_ids >= np.repeat(length // 2, length)) * 1),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        lengths=lengths,
        masked_counts=tuple(map(len, masked)) if masked_share else (0,) * len(lengths),
        sample_ids=torch.arange(len(lengths)),
        masked_token_index=torch.from_numpy(masked_index),
        labels=torch.from_numpy(generator.integers(1, vocab_size, len(masked_index))),
        next_sentence_label=torch.from_numpy(generator.integers(0, 2, len(length))),
        mlm_denominator=torch.tensor(float(len(masked_index))),
        nsp_denominator=torch.tensor(float(len(length))),
    )


def scattered_model(config, *, spread, dtype=torch.float32):
    """A model whose biases and LayerNorm weights are random too, so that no term is trivial."""
    model = BertForPretraining(replace(config, initializer_range=spread), CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=spread)
    return model.to(dtype)


def hugging_face_twin(model):
    """`transformers`' model of this objective, with eager attention and the same weights."""
    ours = model.config
    sizes = {
        "vocab_size": ours.padded_vocab_size,
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.intermediate_size,
        "max_position_embeddings": ours.max_position_embeddings,
    }
    twin = (_modern_twin if ours.architecture == "modern" else _bert_twin)(ours, sizes)
    twin.tie_weights()
    report = twin.load_state_dict(model.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert {name.removeprefix("cls.predictions.") for name in report.missing_keys} <= {
        "decoder.weight",
        "decoder.bias",
    }
    return twin.to(next(model.parameters()).dtype).train()


def _bert_twin(ours, sizes):
    from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

    config = BertConfig(
        **sizes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=ours.layer_norm_epsilon,
        attn_implementation="eager",
    )
    return (BertForMaskedLM if ours.objective == "mlm" else BertForPreTraining)(config)


def _modern_twin(ours, sizes):
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        **sizes,
        norm_eps=ours.layer_norm_epsilon,
        global_attn_every_n_layers=ours.global_attention_every,
        local_attention=ours.attention_window,
        global_rope_theta=ours.rope_base_global,
        local_rope_theta=ours.rope_base_local,
        pad_token_id=0,
        attn_implementation="sdpa",  # eager: NaN where no token is within a padding token's window
    )
    return ModernBertForMaskedLM(config)


def loss_sums(logits, batch):
    """The cross-entropies of each task, summed over the batch from the logits."""
    labels = batch.next_sentence_label
    nsp = None if logits.nsp is None else cross_entropy_sum(logits.nsp, labels)
    return LossSums(mlm=cross_entropy_sum(logits.mlm, batch.labels), nsp=nsp)


def our_loss(model, batch):
    """Scalar loss of one batch."""
    return pretraining_loss(model(batch, "loss_sums"), batch)


def gradients(model, loss):
    """Gradient of the loss by parameter name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def worst_gradient_difference(ours, theirs):
    """Largest L2 distance of one tensor's gradients, over the global norm of theirs."""
    assert ours.keys() == theirs.keys()
    global_norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    distances = [(ours[name] - theirs[name]).norm() / global_norm for name in theirs]
    return float(torch.stack(distances).max())
