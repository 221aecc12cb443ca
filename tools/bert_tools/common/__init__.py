"""Helpers that several tools share."""
