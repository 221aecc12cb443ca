"""A simulator of one training step, and of a whole run, on any number of accelerators."""
