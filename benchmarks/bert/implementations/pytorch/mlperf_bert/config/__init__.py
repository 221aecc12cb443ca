"""The config of a run, with its sections, TOML files, overrides and rules."""
