"""Benchmarks that users can repeat on their own machine: `mlperf_bert bench MEASUREMENT`."""
