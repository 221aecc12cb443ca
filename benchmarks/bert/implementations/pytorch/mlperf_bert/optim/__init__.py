"""Optimizers, each as a readable update function and a class, and learning-rate schedules."""
