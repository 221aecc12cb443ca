"""Unpadded BERT and ModernBERT as single-device code; callers add the parallelism."""
