"""Import of weights from other programs: TensorFlow, Hugging Face."""
