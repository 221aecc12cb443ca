"""The options of `bench`: values out of range, and the config from --config and --set."""

import pytest
from bench_cases import bench, parsed

from bert_tools.bench import cli
from mlperf_bert.errors import ConfigError
from support import CONFIGS

CPU_TINY = CONFIGS / "cpu_tiny.toml"
MEASUREMENTS = ("transformers", "train", "optimizer")


@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_what_cannot_be(measurement):
    for name in ("steps", "seconds", "threads"):
        with pytest.raises(ConfigError, match=f"--{name}: must be from .*, not 0"):
            bench(measurement, f"--{name}", 0)
    for setting, message in (
        ("model.precision=fp12", "model.precision must be .*, not 'fp12'"),
        ("model.num_heads=5", "model.num_heads: 5 does not divide"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench(measurement, settings=(setting,))
    with pytest.raises(ConfigError, match=r"--peak-seconds: must be from .*, not 0"):
        bench("train", "--peak-seconds", 0)


def test_defaults():
    for measurement, *sizes in (("train", 4, 256, 4, 1024), ("optimizer", 12, 768, 12, 3072)):
        args = parsed(measurement)
        args.set = []
        config = cli.make_config(args)
        model = config.model
        found = [model.num_layers, model.hidden_size, model.num_heads, model.intermediate_size]
        assert found == sizes and config.parallel.local_batch_size == 16
        assert model.max_position_embeddings == config.data.max_seq_length == 512
        assert (model.vocab_size, model.hidden_dropout) == (30522, 0.1)


@pytest.mark.parametrize("path", [CPU_TINY, CONFIGS / "h100_1x8x96x1.toml"])
def test_a_config_is_measured_as_one_of_its_ranks(path):
    settings = ("model.num_layers=1", "parallel.local_batch_size=5", "mlperf.enforce_rules=false")
    config = cli.make_config(parsed("train", "--config", path, settings=settings))
    assert config.parallel.world_size == config.model.num_layers == config.run.seed == 1
    assert config.parallel.global_batch_size == 5
    seeded = parsed("train", "--config", path, settings=(*settings, "run.seed=7"))
    assert cli.make_config(seeded).run.seed == 7
