"""Simulates one training step, and a whole run, on any number of accelerators."""
