"""The command `mlperf_bert doctor`, which checks whether this machine can train."""
