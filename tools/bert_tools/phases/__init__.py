"""Train all phases of one recipe with one command."""
