"""Config to parts: the only room that knows all classes."""
