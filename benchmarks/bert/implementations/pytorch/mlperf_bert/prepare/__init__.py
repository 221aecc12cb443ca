"""Prepares data before training: makes shards, sidecars and an index from text."""
