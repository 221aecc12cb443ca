"""Word pieces, vocabulary files and tokenizer files."""
