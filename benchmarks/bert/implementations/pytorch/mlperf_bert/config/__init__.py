"""The config of a run: its sections, TOML files, overrides and rules."""
