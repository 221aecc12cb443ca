"""Convert text to the shards, sidecars and index that training reads."""
