"""Your own text to a trained and exported encoder."""
