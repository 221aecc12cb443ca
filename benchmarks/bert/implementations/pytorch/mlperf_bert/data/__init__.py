"""Read prepared data, sample from it, and load batches of real tokens without padding."""
