"""The command `mlperf_bert convert`, which converts weights from TensorFlow and Hugging Face."""
