"""Implements `mlperf_bert pretrain`, which trains an encoder on a text and exports it."""
