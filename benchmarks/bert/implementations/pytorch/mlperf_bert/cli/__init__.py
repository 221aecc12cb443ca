"""Sub-commands of the submission: each turns its arguments into calls."""
