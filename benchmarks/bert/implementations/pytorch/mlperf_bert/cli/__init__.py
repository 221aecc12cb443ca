"""The sub-commands of the submission."""
