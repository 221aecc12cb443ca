"""BERT and ModernBERT for unpadded batches on a single device. Callers add parallelism."""
