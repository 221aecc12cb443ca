"""Hugging Face's weights, in and out."""
