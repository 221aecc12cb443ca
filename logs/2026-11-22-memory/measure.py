"""The memory plan beside torch: saved bytes and live peak of BERT-large, and a CPU's peak.

python measure.py large      # meta tensors, kernels not run: what is saved, and most at once
python measure.py cpu SECTION.KEY=VALUE ...      # real steps of `bench train`'s model, VmHWM
"""

import gc
import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bert_tools.bench.cli import small_config
from bert_tools.bench.training_run import run_updates, training_run
from mlperf_bert.config.files import load_config
from mlperf_bert.data.batch import blank
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.model import bert
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.choices import AttentionChoice
from mlperf_bert.model.heads import pretraining_loss
from mlperf_bert.parts.memory_plan import (
    GIB,
    USABLE_OF_NAMED,
    expected_forward,
    forward_of_lengths,
    largest_batch,
    plan_memory,
)

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "benchmarks/bert/implementations/pytorch/configs/h200_1x1x448x1.toml"
SIZES = (112, 256, 320, 448)


class Live(TorchDispatchMode):
    """Bytes of all storages that operators made and that are still there."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()
        self._own, self._there = own, {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._there or key in self._own:
            return

        def gone(_: object) -> None:
            self.now -= size
            self._there.pop(key, None)

        self._there[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def large() -> None:
    """BERT-large at four batches in two precisions."""
    from triton.runtime.jit import JITFunction

    from mlperf_bert.model import dropout, fp8, triton_attention, triton_fp8
    from mlperf_bert.model.fused_blocks import FusedBlocks

    JITFunction.run = lambda *_, **__: None
    bert.choose_blocks = lambda _config, _device, scales: FusedBlocks(scales)
    # In the place of readable forms, which a GPU does not run, what their kernels allocate.
    fp8.cast, fp8.cast_with_sums = triton_fp8.cast, triton_fp8.cast_with_sums
    dropout.kept_bytes = lambda counter, *_: torch.empty(
        torch.broadcast_shapes(*(each.shape for each in counter)), dtype=torch.uint8, device="meta"
    )
    attention = AttentionChoice("triton", triton_attention.attend, "")
    print("precision batch tokens masked saved planned peak planned sum margin at80 at141 (GiB)")
    for precision in ("bf16", "fp8"):
        for size in SIZES:
            settings = [f"parallel.local_batch_size={size}", f"model.precision={precision}"]
            config = load_config(CONFIG, ["mlperf.enforce_rules=false", *settings])
            forward = expected_forward(config)
            forward = replace(forward, masked=forward.masked // size * size)
            model = BertForPretraining(config.model, torch.device("meta"), attention=attention)
            model.to(torch.bfloat16).step = torch.zeros(1, dtype=torch.int64, device="meta")
            saved, peak = count(model, forward)
            plan = plan_memory(config, forward)
            planned = plan.of_kind("saved"), plan.of_kind("saved") + plan.of_kind("working")
            figures = saved, planned[0], peak, planned[1], plan.num_bytes, plan.with_margin
            fits = [largest_batch(config, forward, gb * USABLE_OF_NAMED) for gb in (80, 141)]
            cells = " ".join(f"{each / GIB:.2f}" for each in figures)
            print(precision, size, forward.tokens, forward.masked, cells, *fits, flush=True)


def count(model: BertForPretraining, forward: Any) -> tuple[int, int]:
    """Saved bytes, and most at once in forward and backward, without weights and inputs."""
    shape = StaticShape(
        tokens=forward.tokens,
        sequences=forward.sequences,
        masked=forward.masked,
        max_seqlen=512,
        max_masked=76,
    )
    batch, size, empty = blank(shape, torch.device("meta")), forward.sequences, (0,) * shape.dummies
    batch = replace(
        batch,
        lengths=(shape.tokens // size,) * size + empty,
        masked_counts=(shape.masked // size,) * size + empty,
    )
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), batch.input_ids)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    live = Live(own)
    with live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = pretraining_loss(model(batch, "loss_sums"), batch)
        loss.backward()
    return sum(saved.values()), live.peak


def cpu(options: list[str]) -> None:
    """After a small model of the same kind, which loads what is loaded once."""
    sizes = ("model.num_layers=2", "model.hidden_size=64", "model.vocab_size=200")
    same = ("run.seed=1", "run.device=cpu")
    small = small_config(*sizes, "parallel.local_batch_size=2", *same)
    config = small_config(*options, *same)
    torch.set_num_threads(2)
    train(small, steps=1)
    gc.collect()
    before = status("VmRSS")
    train(config, steps=2)
    peak = status("VmHWM") - before
    forwards = [
        forward_of_lengths(config, np.array(batch.lengths), np.array(batch.masked_counts))
        for (batch,) in run_updates(config, 2)
    ]
    planned = max(plan_memory(config, each, evaluates=False).num_bytes for each in forwards)
    print(" ".join(options), f"peak {peak >> 20} planned {planned >> 20} MiB: {planned / peak:.3f}")


def train(config: Any, steps: int) -> None:
    """Real steps."""
    with training_run(config, torch.device("cpu"), num_updates=2) as run:
        for number in range(steps):
            run(number)


def status(name: str) -> int:
    """Bytes that Linux counts for this process."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    large() if sys.argv[1] == "large" else cpu(sys.argv[2:])
