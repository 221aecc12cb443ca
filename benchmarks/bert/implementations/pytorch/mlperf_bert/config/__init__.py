"""The config of a run: its sections, TOML files, overrides, and the rules that it must follow."""
