"""Implements `mlperf_bert pretrain`, which trains an encoder on a user's text and exports it."""
