"""Stop requests, signs of life and where a run is."""
