"""How much memory a run takes, by arithmetic from its config: no torch, nothing is built."""
