"""Shared by all rooms: errors, untrusted input, all-or-nothing writing, facts of the machine."""
