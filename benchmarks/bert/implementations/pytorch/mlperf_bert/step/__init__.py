"""One optimizer step: eager, captured, and its warm-up."""
