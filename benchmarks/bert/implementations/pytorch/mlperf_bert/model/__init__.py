"""BERT and ModernBERT without padding, for a single device. Callers add parallelism."""
