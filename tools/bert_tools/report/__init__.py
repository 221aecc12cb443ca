"""Reports on runs, from the runs' own files."""
