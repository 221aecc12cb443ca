"""The padding-free baseline of `bench transformers`, which is the library's own way to train.

The library's flattening collator concatenates the sequences of a batch into one row. Kernels of
FlashAttention then attend within each sequence. The kernels belong to the package flash-attn, or
to a build that the package `kernels` downloads from the Hugging Face Hub.
"""

from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.config.sections import Precision
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.errors import say

INSTALLED, DOWNLOADED = "flash_attention_2", "kernels-community/flash-attn2"
"""Names of the attention implementations, as `transformers` calls them."""


def why_not(device: torch.device, precision: Precision) -> str | None:
    """Return the reason why this baseline cannot run, or None if it can run."""
    if device.type != "cuda":
        return f"its attention kernels need CUDA, and this run uses {device.type}"
    if precision == "fp32":
        return "its attention kernels need bf16, and this run uses fp32"
    if implementation() is None:
        return "neither of the packages flash-attn and kernels is installed"
    return None


def implementation() -> str | None:
    """Return the name of the attention that can be used here, or None without a package for it."""
    if find_spec("flash_attn") is not None:
        return INSTALLED
    return DOWNLOADED if find_spec("kernels") is not None else None


def use_kernels(baseline: Any) -> None:
    """Make `baseline` compute attention with the kernels, and print if they are downloaded."""
    name = implementation()
    if name == DOWNLOADED:
        say(f"loading compiled attention kernels of {name} from the Hugging Face hub")
    baseline.set_attn_implementation(name)


def flattened_inputs(
    transformers: ModuleType, batch: UnpaddedBatch, *, token_types: bool
) -> dict[str, Any]:
    """Return a batch as the inputs of `masked_loss`, flattened by the library's collator.

    Args:
        transformers: the imported library.
        batch: the batch, on any device.
        token_types: whether the model has an embedding of token types.

    Returns:
        "tokens" contains int64 [1, T] tensors and the boundaries of the sequences, int32 [B + 1].
        "first" contains the positions of the [CLS] tokens, int64 [B], whose hidden states the
        pooler reads. All tensors are on the batch's device.
    """
    device, bounds = batch.input_ids.device, batch.cu_seqlens.tolist()
    words = batch.input_ids.tolist()
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    collated = collate(
        [{"input_ids": words[start:end]} for start, end in pairwise(bounds)], return_tensors="pt"
    )
    collated.pop("labels")
    tokens = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in collated.items()
    }
    if token_types:
        tokens["token_type_ids"] = batch.token_type_ids[None]
    return {
        "tokens": tokens,
        "masked": batch.masked_token_index,
        "first": batch.cu_seqlens[:-1].long(),
        "labels": batch.labels,
        "next_sentence_label": batch.next_sentence_label,
    }
