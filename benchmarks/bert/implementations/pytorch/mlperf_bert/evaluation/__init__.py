"""Evaluation of the masked-LM accuracy on the held-out set."""
