"""Sub-commands of the submission: arguments to calls."""
