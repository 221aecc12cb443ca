"""Run one optimizer step in eager or captured mode, and warm it up."""
