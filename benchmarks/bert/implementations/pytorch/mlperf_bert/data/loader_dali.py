"""`data.loader = "dali"`: the same batches, sent to the device by nvidia-dali's external source."""

import importlib
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.balance import StepPlan
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.loader import BatchSource

INPUT = "block"


class DaliSource:
    """Batches of another source, each block of memory put through a nvidia-dali pipeline.

    The pipeline holds one block and runs when it is asked to: the loader's thread is what makes
    batches ahead of the loop. Construction reads nothing; it raises ConfigError when nvidia-dali
    is not installed. On a GPU (not run) the pipeline copies from its own page-locked memory, so
    `source` needs none.
    """

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        """Put the batches of `source` onto `device`."""
        self._source = source
        self._device = device
        self._pipeline, self._feed = make_pipeline(device)

    @property
    def received_bytes(self) -> int:
        """Those of the source."""
        return self._source.received_bytes

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """This rank's batches of a step, one per forward, on the device."""
        batches = self._source.micro_batches(plan)
        return tuple(batch.map_blocks(self._send) for batch in batches)

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _send(self, block: Tensor) -> Tensor:
        self._pipeline.feed_input(INPUT, [block.numpy()])
        (outputs,) = self._pipeline.run()
        received = torch.empty_like(block, device=self._device)
        # A copy, because the next block overwrites the pipeline's own memory. Without a stream
        # given it has finished on return: only the loader's thread waits for it.
        self._feed(outputs[0], received)
        return received


def make_pipeline(device: torch.device) -> tuple[Any, Any]:
    """A built pipeline of one block, and nvidia-dali's function to copy its output to torch.

    Raises ConfigError when nvidia-dali is not installed.
    """
    try:
        dali: Any = importlib.import_module("nvidia.dali")
        plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
    except ImportError as error:
        remedy = "run in the checkout: tools/venv.sh dali, or use 'thread'"
        raise ConfigError("data.loader", f"'dali' needs nvidia-dali ({error})", remedy) from None
    pipeline = dali.Pipeline(
        batch_size=1,
        num_threads=1,
        device_id=device.index if device.type == "cuda" else None,
        exec_pipelined=False,
        exec_async=False,
        prefetch_queue_depth=1,
    )
    with pipeline:
        block = dali.fn.external_source(name=INPUT, ndim=1)
        pipeline.set_outputs(block.gpu() if device.type == "cuda" else block)
    pipeline.build()
    return pipeline, plugin.feed_ndarray
