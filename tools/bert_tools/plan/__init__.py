"""Implements `mlperf_bert plan`, which answers questions before a run without torch or a GPU."""
