"""Trains an encoder on your text and exports it: `mlperf_bert pretrain`."""
