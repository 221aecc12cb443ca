"""The calls of nvidia-dali that the loader makes, on a CPU, as its documentation describes them.

`feed_input` copies what it is given; `run` takes what was fed first, and its output is the
pipeline's own memory, which the next `run` overwrites; `feed_ndarray` wants equal types and shapes.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

# One block at a time, when it is asked for.
HOW = {
    **{"batch_size": 1, "num_threads": 1, "prefetch_queue_depth": 1},
    **{"exec_pipelined": False, "exec_async": False},
}


class Pipeline:
    """A pipeline of one external source, which is its output."""

    runs = 0  # of all pipelines

    def __init__(self, *, device_id, **how):
        assert device_id is None and how == HOW
        self._memory, self._fed = np.empty(0, dtype=np.uint8), {}
        self._is_built = False

    def __enter__(self):
        """Within, its operators are made."""

    def __exit__(self, *_):
        """They are."""

    def set_outputs(self, *names):
        self._fed = {name: [] for name in names}

    def build(self):
        self._is_built = True

    def feed_input(self, name, data):
        assert self._is_built and len(data) == 1 and data[0].ndim == 1
        self._fed[name].append(data[0].copy())

    def run(self):
        Pipeline.runs += 1
        ((fed, *_),) = self._fed.values()
        self._fed = {name: waiting[1:] for name, waiting in self._fed.items()}
        if len(fed) > len(self._memory):
            self._memory = np.empty(len(fed), dtype=np.uint8)
        self._memory.fill(0xA5)  # what the last output showed is gone
        self._memory[: len(fed)] = fed
        return ([self._memory[: len(fed)]],)


def feed_ndarray(output, arr, cuda_stream=None):
    assert arr.dtype == torch.uint8 and output.shape == arr.shape and cuda_stream is None
    return arr.copy_(torch.from_numpy(output))


def install(monkeypatch):
    """Have `nvidia.dali` be this."""
    dali = ModuleType("nvidia.dali")
    dali.Pipeline = Pipeline
    dali.fn = SimpleNamespace(external_source=lambda *, name, ndim: name)
    plugin = ModuleType("nvidia.dali.plugin.pytorch")
    plugin.feed_ndarray = feed_ndarray
    monkeypatch.setitem(sys.modules, "nvidia.dali", dali)
    monkeypatch.setitem(sys.modules, "nvidia.dali.plugin.pytorch", plugin)
