"""Creates reports about runs from the files that the runs wrote."""
