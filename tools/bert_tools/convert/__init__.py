"""Conversion of weights from TensorFlow and Hugging Face: `mlperf_bert convert`."""
