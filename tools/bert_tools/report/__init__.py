"""Reports on runs, made from the files that the runs wrote."""
