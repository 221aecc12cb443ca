"""The run config: frozen sections, TOML files, overrides and rules."""
