"""Prepare data before training: make shards, their sidecars and an index from text."""
