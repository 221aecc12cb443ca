"""Optimizers (pure update functions and thin classes around them) and the learning rate."""
