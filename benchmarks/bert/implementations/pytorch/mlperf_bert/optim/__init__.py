"""Optimizers (pure update functions and thin classes) and the learning-rate schedule."""
