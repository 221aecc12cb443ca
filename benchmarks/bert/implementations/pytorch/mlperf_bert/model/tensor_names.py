"""TensorFlow's names of our parameters, as in published checkpoints and MLPerf logs.

The first BERT release (https://github.com/google-research/bert) named its variables; MLPerf's
checkpoint and its rule files keep those names. Ours are Hugging Face's.
"""

from types import MappingProxyType

# An embedding is one table, and the next-sentence projection has a name of its own.
WHOLE_NAMES = MappingProxyType(
    {
        "bert.embeddings.word_embeddings.weight": "bert/embeddings/word_embeddings",
        "bert.embeddings.position_embeddings.weight": "bert/embeddings/position_embeddings",
        "bert.embeddings.token_type_embeddings.weight": "bert/embeddings/token_type_embeddings",
        "cls.predictions.bias": "cls/predictions/output_bias",
        "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
        "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    }
)
# (end of our name, end of theirs) of everything else; the first match is used.
ENDINGS = (
    ("LayerNorm.weight", "LayerNorm/gamma"),
    ("LayerNorm.bias", "LayerNorm/beta"),
    (".weight", "/kernel"),
    (".bias", "/bias"),
)


def tensorflow_name(parameter_name: str) -> str:
    """TensorFlow's name of one of `BertForPretraining`'s parameters, e.g. bert/pooler/dense/bias.

    Different parameters have different names. A `kernel` holds the transpose of our `weight`; every
    other tensor is laid out as ours is. The word embedding, tied to the decoder, is one tensor on
    both sides; ours may have more rows, which pad the vocabulary.

    Raises ValueError for a name that is no parameter's.
    """
    if parameter_name in WHOLE_NAMES:
        return WHOLE_NAMES[parameter_name]
    for ours, theirs in ENDINGS:
        if parameter_name.endswith(ours):
            stem = parameter_name.removesuffix(ours).replace("encoder.layer.", "encoder.layer_")
            return stem.replace(".", "/") + theirs
    raise ValueError(f"{parameter_name!r} is not the name of a parameter")
