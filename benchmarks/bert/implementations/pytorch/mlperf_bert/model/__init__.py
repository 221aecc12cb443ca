"""Unpadded BERT and ModernBERT as single-device code, to which callers add parallelism."""
