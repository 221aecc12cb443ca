"""Answers questions before a run: `mlperf_bert plan`. It needs no torch, GPU or cluster."""
