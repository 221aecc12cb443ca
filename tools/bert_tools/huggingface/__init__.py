"""Read and write models in the format of Hugging Face."""
