"""One optimizer step in eager and in captured mode, and its warm-up."""
