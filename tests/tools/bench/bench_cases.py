"""`mlperf_bert bench` in this process, on a tiny model on one CPU thread."""

import argparse
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import torch

from bert_tools.bench import cli
from mlperf_bert.config.files import load_config

CPU = torch.device("cpu")
TINY = (
    *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=101"),
    *("model.intermediate_size=128", "model.max_position_embeddings=32"),
    *("data.max_seq_length=32", "parallel.local_batch_size=4"),
)


def tiny(*settings, seed=1):
    """The config that `bench` measures with TINY and `settings`."""
    return load_config(cli.BASE, [*TINY, *settings, f"run.seed={seed}", "run.device=cpu"])


def parsed(measurement, *options, settings=()):
    """Arguments of a measurement of TINY with `settings`, or of a --config that is named."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [measurement, "--threads", "1", "--set", "run.device=cpu"]
    sizes = () if "--config" in options else TINY
    words += [word for each in (*sizes, *settings) for word in ("--set", each)]
    words += map(str, options)
    return parser.parse_args(words)


def bench(measurement, *options, settings=()):
    """The output of a measurement, and its progress."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert cli.run(parsed(measurement, *options, settings=settings)) == 0
    return out.getvalue(), err.getvalue()


def measured(measurement, *options, settings=()):
    """Its JSON object, the lines that people see of it, and its progress."""
    printed, progress = bench(measurement, "--json", *options, settings=settings)
    result = json.loads(printed)
    assert result["schema_version"] == {"transformers": 3, "train": 2, "optimizer": 2}[measurement]
    return result, "\n".join(cli.lines_of(result)), progress


OF_THE_MACHINE = ("torch", "transformers", "strongest", "memory_peak_bytes")


def held(facts):
    """Facts with a fixed number in place of each that another run has otherwise."""
    if isinstance(facts, list):
        return [held(each) for each in facts]
    if isinstance(facts, dict):
        return {
            key: 1 if key in OF_THE_MACHINE else held(value) if key != "config" else value
            for key, value in facts.items()
        }
    return 1234.5 if isinstance(facts, float) else facts


def assert_held(result, snapshot):
    """A result's keys and values, and the lines that people see of it, are as before."""
    facts = held(result)
    assert cli.lines_of(facts) == snapshot(name="printed")
    del facts["config"]
    assert facts == snapshot(name="json")
