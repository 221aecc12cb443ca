"""Names and values in the fixtures that TensorFlow 2.21.0 wrote (docs/decisions/0018).

Names are those of the first BERT release (https://github.com/google-research/bert).
"""

import json
import shutil
import zlib
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "data" / "tensorflow"

# A BERT that the fixtures hold: (words, positions, hidden, intermediate, layers).
VOCAB_SIZE, POSITIONS, HIDDEN, INTERMEDIATE, LAYERS, HEADS = 45, 16, 8, 16, 2, 2
STEP = 28252

# As Google's code counts: prefix of a checkpoint's files.
V2 = FIXTURES / "bert_v2" / f"model.ckpt-{STEP}"
V2_SHARDS = FIXTURES / "sharded_v2" / "model.ckpt"
OBJECTS = FIXTURES / "objects_v2" / "ckpt-1"
SCORES = FIXTURES / "bert_scores.npz"  # what TensorFlow's operators make of V2 and `inputs`


def write_published(directory):
    """V2 beside its vocabulary and config, as they are published; the words of the vocabulary."""
    shutil.copytree(V2.parent, directory)
    words = [f"w{number}" for number in range(VOCAB_SIZE - 5)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "intermediate_size": INTERMEDIATE}
    sizes |= {"max_position_embeddings": POSITIONS}
    (directory / "bert_config.json").write_text(json.dumps({**sizes, "hidden_act": "gelu"}))
    return words


def layer_shapes(number):
    """The tensors of one layer of the encoder."""
    prefix = f"bert/encoder/layer_{number}"
    dense = dict.fromkeys((f"attention/self/{each}" for each in ("query", "key", "value")), HIDDEN)
    dense |= {"attention/output/dense": HIDDEN, "intermediate/dense": HIDDEN}
    dense |= {"output/dense": INTERMEDIATE}
    shapes = {}
    for part, width in dense.items():
        out = INTERMEDIATE if part == "intermediate/dense" else HIDDEN
        shapes |= {f"{prefix}/{part}/kernel": (width, out), f"{prefix}/{part}/bias": (out,)}
    for part in ("attention/output", "output"):
        for name in ("gamma", "beta"):
            shapes[f"{prefix}/{part}/LayerNorm/{name}"] = (HIDDEN,)
    return shapes


def weight_shapes():
    """All weights of the BERT, with both heads."""
    shapes = {
        "bert/embeddings/word_embeddings": (VOCAB_SIZE, HIDDEN),
        "bert/embeddings/token_type_embeddings": (2, HIDDEN),
        "bert/embeddings/position_embeddings": (POSITIONS, HIDDEN),
        "bert/embeddings/LayerNorm/gamma": (HIDDEN,),
        "bert/embeddings/LayerNorm/beta": (HIDDEN,),
    }
    for number in range(LAYERS):
        shapes |= layer_shapes(number)
    return shapes | {
        "bert/pooler/dense/kernel": (HIDDEN, HIDDEN),
        "bert/pooler/dense/bias": (HIDDEN,),
        "cls/predictions/transform/dense/kernel": (HIDDEN, HIDDEN),
        "cls/predictions/transform/dense/bias": (HIDDEN,),
        "cls/predictions/transform/LayerNorm/gamma": (HIDDEN,),
        "cls/predictions/transform/LayerNorm/beta": (HIDDEN,),
        "cls/predictions/output_bias": (VOCAB_SIZE,),
        "cls/seq_relationship/output_weights": (2, HIDDEN),
        "cls/seq_relationship/output_bias": (2,),
    }


def bert_values():
    """Weights, the optimizer's slots (the second moments all equal), and the step."""
    values = {"global_step": np.array(STEP, np.int64)}
    for name, shape in weight_shapes().items():
        values[name] = drawn(name, shape)
        values[f"{name}/adam_m"] = drawn(f"{name}/adam_m", shape)
        values[f"{name}/adam_v"] = np.full(shape, 0.25, np.float32)
    return values


def inputs():
    """Two sequences of 12 and 7 tokens, padded to 12: int64 [2, 12]."""
    ids = np.arange(24).reshape(2, 12) * 7 % (VOCAB_SIZE - 5) + 5
    mask = np.arange(12) < np.array([[12], [7]])
    segments = np.arange(12) >= np.array([[5], [4]])
    arrays = {"input_ids": ids * mask, "input_mask": mask, "segment_ids": segments & mask}
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def drawn(name, shape):
    """Multiples of 2**-16 between -0.5 and 0.5 that look random: float32 [shape]."""
    size = int(np.prod(shape, dtype=np.int64))
    mixed = (np.arange(size) + zlib.crc32(name.encode())) * 2654435761 % 2**32 >> 16
    return (mixed / 2**16 - 0.5).astype(np.float32).reshape(shape)


def odd_values():
    """A scalar, an empty one, and other dtypes; bfloat16 as float32."""
    return {
        "scalar": drawn("scalar", ()),
        "empty": np.zeros((0, 3), np.float32),
        "scope/cube": drawn("cube", (3, 2, 2)),
        "half": drawn("half", (5,)).astype(np.float16),
        "double": drawn("double", (5, 1)).astype(np.float64),
        "int": np.array([-(2**31), -1, 0, 1, 2**31 - 1], np.int32),
        "long": np.array([[-(2**63), -1, 0], [1, 300, 2**63 - 1]], np.int64),
        # What bfloat16 holds exactly: eight bits of a fraction.
        "brain": np.round(drawn("brain", (6,)) * 128).astype(np.float32) / 128,
    }


def partitioned_values():
    """Variables that are kept in parts: along the first axis, and along the second."""
    return {"rows": drawn("rows", (10, 3)), "columns": drawn("columns", (4, 9))}
