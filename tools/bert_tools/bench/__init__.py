"""Speed measurements that users run on their own machine with `mlperf_bert bench`."""
