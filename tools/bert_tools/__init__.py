"""The tools around the submission, which are commands of `mlperf_bert`.

The commands are plan, tune, report, watch, bench, doctor, convert, package and squad, among others.
"""
