"""Evaluate the masked-LM accuracy of a model on the held-out set."""
