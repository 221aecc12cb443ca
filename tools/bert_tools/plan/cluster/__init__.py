"""Simulates training steps and whole runs on any number of accelerators."""
