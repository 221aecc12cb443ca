"""Whether the ranks of a job reach each other, and how fast."""
