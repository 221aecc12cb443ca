"""Implements `mlperf_bert plan`, which answers questions about a run without torch or a GPU."""
