"""The command `mlperf_bert package`, which builds and checks an MLPerf submission without torch."""
