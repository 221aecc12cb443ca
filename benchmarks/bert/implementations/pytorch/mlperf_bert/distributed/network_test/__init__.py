"""The network test: do the ranks of a job reach each other, and how fast."""
