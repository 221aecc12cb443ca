"""The outputs of a run: its directory, metrics, MLPerf log and progress lines."""
