"""Checks that this machine, or these ranks, can train: `mlperf_bert doctor`."""
