"""A submission directory from this repository, checked: `mlperf_bert package`; needs no torch."""
