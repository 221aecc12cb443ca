"""Tools for planning, measuring, converting and packaging, which are commands of `mlperf_bert`.

Among these commands are plan, tune, report, watch, bench, doctor, convert, package and squad.
"""
