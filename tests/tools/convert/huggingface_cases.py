"""Small models in Hugging Face's form, and batches of the synthetic data for both sides."""

import json
import os
import shutil
import tomllib

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bert_tools.bench.baseline import padded_inputs
from bert_tools.huggingface.conversion import plan_conversion, write_checkpoint
from bert_tools.huggingface.reader import open_huggingface
from mlperf_bert.checkpoint.first_weights import settings_of
from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import read_config, read_manifest
from mlperf_bert.config.files import tables_to_toml
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.model.bert import BertForPretraining
from support import TINY_CONFIG

os.environ["HF_HUB_OFFLINE"] = "1"  # what must not be asked for, is not there

CPU = torch.device("cpu")
NUM_WORDS, PADDED = 69, 72
WORDS, WORD_BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
SMALL = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "layer_norm_eps": 1e-7,
    "hidden_dropout_prob": 0.25,
}
# Layers 0 and 2 see everything, layer 1 and 3 two tokens to each side.
SMALL_MODERN = {
    **{name: value for name, value in SMALL.items() if not name.startswith(("layer", "hidden_dr"))},
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 2,
    "local_attention": 4,
    "norm_eps": 1e-4,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
}
PATTERN = {  # the same, in our words
    "architecture": "modern",
    "objective": "mlm",
    "num_layers": 4,
    "global_attention_every": 2,
    "attention_window": 4,
    "rope_base_global": 50.0,
    "rope_base_local": 20.0,
    "layer_norm_epsilon": 1e-4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MODERN = [f"model.{name}={value}" for name, value in PATTERN.items()]


def make_theirs(form, **settings):
    """A model of `transformers` whose every tensor is random, in evaluation mode."""
    import transformers

    if form.startswith("Modern"):
        # Eager attention gives NaN where a padding token sees no token.
        config = transformers.ModernBertConfig(**{**SMALL_MODERN, **settings})
        config._attn_implementation = "sdpa"
    else:
        config = transformers.BertConfig(**{**SMALL, **settings}, attn_implementation="eager")
    torch.manual_seed(5)
    model = getattr(transformers, form)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one = 1.0 if name.lower().endswith("norm.weight") else 0.0
            parameter.normal_(one, 0.2)
    return model.eval()


def save_theirs(directory, form, **settings):
    """The model, saved as `save_pretrained` does it."""
    model = make_theirs(form, **settings)
    model.save_pretrained(directory)
    return model


def restated(source, folder, without=(), **more):
    """The same weights under a config without some keys, and with others."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    stated = {k: v for k, v in json.loads(path.read_text()).items() if k not in without}
    path.write_text(json.dumps(stated | more))
    return folder


def with_tensors(source, folder, change):
    """The same config beside other tensors."""
    shutil.copytree(source, folder)
    tensors = change(tensors_of(source))
    save_file(tensors, folder / "model.safetensors")
    return folder


def convert(source, out, words, missing="refuse"):
    """As the command does."""
    conversion = plan_conversion(open_huggingface(source), words, missing)
    write_checkpoint(conversion, out, {"format": "huggingface", "name": source.name})
    return conversion


def load_ours(checkpoint):
    """The model of a checkpoint, in evaluation mode."""
    model = BertForPretraining(read_config(checkpoint).model, CPU)
    load_weights(model, checkpoint, read_manifest(checkpoint).vocabulary_sha256)
    return model.eval()


def tensors_of(checkpoint):
    """The weights of a checkpoint, or of an export."""
    return load_file(checkpoint / "model.safetensors")


def a_batch(data, form="Bert", count=16):
    """Held-out sequences, without padding and as a form of `transformers` takes them."""
    index = LengthIndex.open(data / "eval")
    ids = np.arange(count)
    samples = SampleReader(data / "eval", index.manifest).read(ids)
    batch = make_batch(samples, ids, mlm_denominator=1.0, nsp_denominator=1.0)
    padded = padded_inputs(batch, batch.max_seqlen)
    wanted = ["input_ids", "attention_mask"]
    if form.startswith("Bert"):
        wanted.append("token_type_ids")
    return batch, {name: padded[name] for name in wanted}


def real_rows(padded, inputs):
    """[B, S, ...] -> [T, ...], as ours are."""
    return padded[inputs["attention_mask"].bool()]


def config_for(checkpoint, file):
    """Write the tiny config with the model of a checkpoint's weights."""
    tables = tomllib.loads(TINY_CONFIG)
    tables["model"] = settings_of(read_config(checkpoint).model)
    file.write_text(tables_to_toml(tables))
    return file
