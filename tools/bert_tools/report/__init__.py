"""What a run's own files say about it."""
