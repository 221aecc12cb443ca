"""Writes the fixtures of tests/data/tensorflow with the real TensorFlow: `... OUT_DIRECTORY`.

Where tensorflow-cpu 2.21.0 is installed: `PYTHONPATH=tests python THIS_FILE OUT`.
"""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

import tensorflow_cases as cases


def write_all(out):
    """Write every fixture below a directory."""
    with tf.Graph().as_default():
        for name, value in cases.bert_values().items():
            tf.compat.v1.get_variable(name, initializer=value)
        save(out / cases.V2.relative_to(cases.FIXTURES), sharded=False)
    with tf.Graph().as_default():
        make_odd_variables(cases.odd_values())
        save(out / cases.V2_SHARDS.relative_to(cases.FIXTURES), sharded=True)
    write_objects(out / cases.OBJECTS.relative_to(cases.FIXTURES))
    np.savez_compressed(out / cases.SCORES.name, **scores(cases.bert_values()))


def make_odd_variables(values):
    """Unusual variables on two devices, of which each saves a shard, and some in parts."""
    get = tf.compat.v1.get_variable
    with tf.device("/cpu:0"):
        for name, value in values.items():
            dtype = tf.bfloat16 if name == "brain" else tf.as_dtype(value.dtype)
            get(name, initializer=tf.cast(tf.constant(value), dtype))
    with tf.device("/cpu:1"):
        for name, value in cases.partitioned_values().items():
            partitioner = tf.compat.v1.fixed_size_partitioner(*cases.PARTITIONED[name])
            get(name, value.shape, initializer=_part_of(value), partitioner=partitioner)


def _part_of(value):
    """An initializer that gives each part of a variable its own part of `value`."""

    def initialize(shape, dtype=None, partition_info=None):
        starts = partition_info.var_offset
        ranges = zip(starts, shape, strict=True)
        return value[tuple(slice(start, start + size) for start, size in ranges)]

    return initialize


def save(path, *, sharded):
    """Save the variables of the current graph."""
    path.parent.mkdir(parents=True)
    variables = tf.compat.v1.global_variables()
    saver = tf.compat.v1.train.Saver(variables, sharded=sharded)
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with tf.compat.v1.Session(config=config) as session:
        session.run(tf.compat.v1.global_variables_initializer())
        saver.save(session, str(path), write_meta_graph=False, write_state=False)


def write_objects(path):
    """A checkpoint of TensorFlow 2's own kind, which is refused."""
    path.parent.mkdir(parents=True)
    model = tf.Module()
    model.one = tf.Variable([1.0, 2.0], name="one")
    tf.train.Checkpoint(model=model).save(str(path).removesuffix("-1"))
    (path.parent / "checkpoint").unlink()


def scores(weights):
    """The outputs of BERT (arXiv 1810.04805) for two padded sequences, from float64 weights."""
    wide = {name: tf.constant(value, tf.float64) for name, value in weights.items()}
    inputs = cases.inputs()
    ids, segments, mask = (inputs[key] for key in ("input_ids", "segment_ids", "input_mask"))
    hidden = tf.gather(wide["bert/embeddings/word_embeddings"], ids)
    hidden += tf.gather(wide["bert/embeddings/token_type_embeddings"], segments)
    hidden += wide["bert/embeddings/position_embeddings"][: ids.shape[1]]
    hidden = _normed(hidden, wide, "bert/embeddings")
    for number in range(cases.LAYERS):
        hidden = _layer(hidden, mask, wide, f"bert/encoder/layer_{number}")
    pooled = tf.tanh(_dense(hidden[:, 0], wide, "bert/pooler/dense"))
    pairs = tf.matmul(pooled, wide["cls/seq_relationship/output_weights"], transpose_b=True)
    transformed = _gelu(_dense(hidden, wide, "cls/predictions/transform/dense"))
    transformed = _normed(transformed, wide, "cls/predictions/transform")
    words = tf.einsum("bsd,vd->bsv", transformed, wide["bert/embeddings/word_embeddings"])
    return {
        "hidden": hidden.numpy(),
        "mlm": (words + wide["cls/predictions/output_bias"]).numpy(),
        "nsp": (pairs + wide["cls/seq_relationship/output_bias"]).numpy(),
    }


def _layer(hidden, mask, weights, prefix):
    heads = {}
    for part in ("query", "key", "value"):
        projected = _dense(hidden, weights, f"{prefix}/attention/self/{part}")
        heads[part] = tf.reshape(projected, (*mask.shape, cases.HEADS, -1))
    size = cases.HIDDEN // cases.HEADS
    logits = tf.einsum("bfnh,btnh->bnft", heads["query"], heads["key"]) / size**0.5
    logits += (mask[:, None, None, :] - 1.0) * 1e9
    context = tf.einsum("bnft,btnh->bfnh", tf.nn.softmax(logits), heads["value"])
    attended = _dense(
        tf.reshape(context, hidden.shape), weights, f"{prefix}/attention/output/dense"
    )
    hidden = _normed(hidden + attended, weights, f"{prefix}/attention/output")
    inner = _gelu(_dense(hidden, weights, f"{prefix}/intermediate/dense"))
    return _normed(
        hidden + _dense(inner, weights, f"{prefix}/output/dense"), weights, f"{prefix}/output"
    )


def _dense(values, weights, prefix):
    return (
        tf.einsum("...i,io->...o", values, weights[f"{prefix}/kernel"]) + weights[f"{prefix}/bias"]
    )


def _normed(values, weights, prefix):
    mean, variance = tf.nn.moments(values, axes=[-1], keepdims=True)
    gamma, beta = (weights[f"{prefix}/LayerNorm/{name}"] for name in ("gamma", "beta"))
    return (values - mean) / tf.sqrt(variance + 1e-12) * gamma + beta


def _gelu(values):
    return values * 0.5 * (1.0 + tf.math.erf(values / 2**0.5))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
