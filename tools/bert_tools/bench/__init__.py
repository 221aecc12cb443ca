"""Measurements that a user can repeat: `mlperf_bert bench <command>`."""
