"""Answers before a run: `mlperf_bert plan <command>`; needs no torch, no GPU and no cluster."""
