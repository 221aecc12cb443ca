"""Ranks, process groups, and the communication of gradients."""
