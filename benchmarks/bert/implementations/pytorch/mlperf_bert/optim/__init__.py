"""Optimizers as pure updates with thin classes, and the learning-rate schedule."""
