"""Scores an encoder on a user's labelled texts, next to plain baselines."""
