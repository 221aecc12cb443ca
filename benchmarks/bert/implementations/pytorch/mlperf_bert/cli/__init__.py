"""The sub-commands of `mlperf_bert` that do not need the package of tools, `bert_tools`."""
