"""Check whether this machine can train: `mlperf_bert doctor`."""
