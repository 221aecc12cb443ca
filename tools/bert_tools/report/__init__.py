"""Makes reports on runs from the files that the runs wrote."""
