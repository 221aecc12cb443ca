"""Ranks and process groups."""
