"""How many ranks an engine has that does not say it."""

import torch


def default_ranks() -> int:
    """One for each GPU, and two where there is none or one."""
    return max(2, torch.cuda.device_count() if torch.cuda.is_available() else 0)
