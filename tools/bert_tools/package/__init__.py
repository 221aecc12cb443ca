"""Implements `mlperf_bert package`, which builds and checks a submission without torch."""
