"""The sub-commands that need only the submission's code, not the tools."""
