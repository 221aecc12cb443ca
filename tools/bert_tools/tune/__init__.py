"""Hyper-parameter search: many short trainings through the normal command, the best one written."""
