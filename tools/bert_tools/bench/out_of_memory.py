"""What benchmarks do where memory is full: a reason instead of a figure, and everything freed."""

import gc

import torch

OUT_OF_MEMORY = "out of memory"


def reason_of(error: torch.OutOfMemoryError) -> str:
    """The error's first line, as the reason why there is no figure."""
    return f"{OUT_OF_MEMORY} ({(str(error).splitlines() or [''])[0]})"


def free_memory() -> None:
    """Free what nothing holds any more; call it behind the `except`, as an error holds tensors."""
    gc.collect()  # a model's parts refer to each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
