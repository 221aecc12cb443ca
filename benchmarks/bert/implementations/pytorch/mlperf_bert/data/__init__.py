"""Formats of prepared data, and sampling and loading of unpadded batches."""
