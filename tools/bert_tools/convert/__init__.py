"""Convert weights from TensorFlow and Hugging Face to a checkpoint: `mlperf_bert convert`."""
