"""Benchmarks that users can run on their own machine: `mlperf_bert bench MEASUREMENT`."""
