"""Engines that fine-tune one model in several ways: alone, data parallel, sharded, pipelined."""
