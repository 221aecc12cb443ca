"""Reading and writing of models in the format of Hugging Face."""
