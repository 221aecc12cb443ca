"""Read vocabulary and tokenizer files, and encode text with them."""
