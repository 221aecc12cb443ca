"""Models in the format of Hugging Face, which this package reads and writes."""
