"""Builds and checks a submission directory: `mlperf_bert package`. It needs no torch."""
