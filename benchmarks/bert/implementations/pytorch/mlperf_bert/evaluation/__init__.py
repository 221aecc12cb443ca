"""Accuracy: when, on which batches, against which reference points."""
