"""What a run writes: its directory, metrics, MLPerf log and progress."""
