"""Weights of other programs in: TensorFlow, Hugging Face."""
