"""Verification of prepared sets: `check.py` says what is checked, in which order."""
