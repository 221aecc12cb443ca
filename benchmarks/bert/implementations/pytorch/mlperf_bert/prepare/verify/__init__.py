"""Verification of prepared sets; `check.py` gives the checks in their order."""
