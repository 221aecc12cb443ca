"""Prepared data: formats, sampling and loading of unpadded batches."""
