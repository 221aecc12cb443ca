"""NVML's handle of a GPU, if `pynvml` is installed and works; NVML only adds facts."""

import importlib
from typing import Any


def nvml_handle(index: int) -> tuple[Any, Any] | None:
    """`pynvml` and its handle of torch's device `index`; None if there is no NVML."""
    import torch

    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        # By name: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's.
        name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return nvml, nvml.nvmlDeviceGetHandleByUUID(name)
    except Exception:  # not installed, no library, a MIG slice: it only adds facts
        return None
