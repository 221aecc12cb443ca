"""Code that several of the tools share."""
