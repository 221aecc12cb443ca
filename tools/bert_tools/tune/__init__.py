"""Searches hyper-parameters with many short training runs and writes the best config."""
