"""Draw dynamic masks, which are new for each training batch, instead of the stored masks.

RoBERTa introduced dynamic masks (arXiv 1907.11692, section 4.1). A rank draws the masks after it
has received a batch, no matter how the samples were read or exchanged. The random numbers depend
only on (seed, step, sample id).
"""

from dataclasses import fields
from pathlib import Path

import numpy as np
from torch import Tensor

from mlperf_bert.compiled import usable_cache
from mlperf_bert.data.batch import UnpaddedBatch, empty_batch
from mlperf_bert.data.compiled_masking import ALL_DRAWN, draw_masks
from mlperf_bert.data.index import Manifest, masked_count_table, special_ids
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.errors import DataError

_DRAWN = ("masked_token_index", "labels")  # the other tensors of a batch do not change


class DynamicMasks:
    """A masker that draws new masks each time a sample is trained on.

    A sample gets the same masks twice only if one step contains it twice, at the end of an epoch,
    or if a later phase repeats the steps of an earlier one. The constructor compiles the masking
    kernel and reads no samples. It raises ConfigError if numba's cache cannot be used.
    """

    def __init__(
        self,
        set_dir: Path,
        manifest: Manifest,
        *,
        rate: float,
        max_predictions: int,
        seed: int,
    ) -> None:
        """Prepare to mask the fraction `rate` of each sample's tokens.

        At most `max_predictions` tokens of a sample are masked.
        """
        self._set_dir = set_dir
        self._counts = masked_count_table(manifest.max_seq_length, max_predictions, rate)
        self._special = special_ids(manifest)
        self._mask_id = manifest.mask_id
        self._vocab_size = manifest.vocab_size
        self._seed = seed
        with usable_cache(draw_masks):
            self._draw(empty_batch((), ()), np.zeros(0, dtype=np.int64), 0)

    def of(self, batch: UnpaddedBatch, step: int) -> UnpaddedBatch:
        """Return a copy of a batch in which new masks for this step replace the stored ones.

        Raises DataError if a sample has fewer maskable tokens than the number of tokens to mask.
        """
        counts = self._counts[list(batch.lengths)].astype(np.int64)
        drawn = empty_batch(batch.lengths, tuple(counts.tolist()))
        for field in fields(batch):
            tensor = getattr(batch, field.name)
            if isinstance(tensor, Tensor) and field.name not in _DRAWN:
                getattr(drawn, field.name).copy_(tensor)
        drawn.input_ids.numpy()[batch.masked_token_index.numpy()] = batch.labels.numpy()
        wrong = self._draw(drawn, counts, step)
        if wrong != ALL_DRAWN:
            number, count = int(batch.sample_ids[wrong]), int(counts[wrong])
            problem = f"sample {number} has fewer maskable tokens than the required {count}"
            remedy = "run `mlperf_bert verify --full` on this set, or lower data.masking_rate"
            raise DataError(str(self._set_dir), problem, remedy)
        return drawn

    def _draw(self, batch: UnpaddedBatch, counts: Int64Array, step: int) -> int:
        offsets, index = batch.cu_seqlens.numpy(), batch.masked_token_index.numpy()
        if not len(counts):
            offsets[:] = 0  # an empty batch, which only compiles the kernel
        wrong = draw_masks(
            batch.input_ids.numpy(),
            offsets,
            batch.sample_ids.numpy(),
            counts,
            self._special,
            self._mask_id,
            self._vocab_size,
            step,
            self._seed,
            index,
            batch.labels.numpy(),
        )
        index += np.repeat(offsets[:-1], counts)
        return int(wrong)
