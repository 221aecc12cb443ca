"""A run in the terminal while it trains: what its files say, looked at again and again."""
