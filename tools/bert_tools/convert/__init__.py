"""Weights of other programs in, and ours out: TensorFlow, Hugging Face."""
