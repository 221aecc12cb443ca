"""Offline data preparation: text to shards, sidecars and index."""
