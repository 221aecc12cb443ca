"""A sampler by its name in the config: the right one, and what a run says of it."""

from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.common.exit_statuses import TARGET_MISSED
from mlperf_bert.config.sections import SamplerName
from mlperf_bert.data.sampler import (
    PUBLISHED_COUNTS,
    PublishedStrataSampler,
    QuantileSampler,
    Sampler,
    StrataSampler,
    UniformSampler,
    make_sampler,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("uniform", UniformSampler),
        ("quantile", QuantileSampler),
        ("strata", StrataSampler),
        ("strata_6_3_2_5", PublishedStrataSampler),
        ("strata_4_2_2_4", PublishedStrataSampler),
    ],
)
def test_samplers_by_name(name: SamplerName, kind: type[Sampler]) -> None:
    sampler = make_sampler(
        name,
        order_by_length=np.arange(20 * 32),
        length_histogram=[0, *[20] * 32],
        global_batch_size=48,
        seed=3,
    )
    assert type(sampler) is kind
    assert len(np.unique(sampler.global_batch(1))) == 48


def test_a_run_reports_what_its_counts_do_to_the_data(
    tiny_config: Path,
    synthetic_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PUBLISHED_COUNTS, "strata_6_3_2_5", (6, 3, 7))  # no sample is in 1-8
    places = ["--config", str(tiny_config), "--data", str(synthetic_data)]
    for sampler, is_biased in (("strata_6_3_2_5", True), ("quantile", False)):
        sets = ["--set", f"data.sampler={sampler}", "--set", "run.max_steps=1"]
        run_dir = ["--run-dir", str(tmp_path / sampler)]
        assert main(["train", *places, *sets, *run_dir]) == TARGET_MISSED
        assert ("mean length drawn" in capsys.readouterr().out) == is_biased


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sampler=strata_4_2_2_4"], "multiple of 12 samples; the global batch is 16"),
        (["data.sampler=quantile", "data.quantiles=5"], "data.quantiles: 5 does not divide"),
        (["data.sampler=strata", "parallel.local_batch_size=1"], "use 'quantile'"),
    ],
)
def test_what_a_sampler_cannot_do_is_one_line_and_leaves_nothing(
    overrides: list[str],
    words: str,
    tiny_config: Path,
    synthetic_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = ["--data", str(synthetic_data), "--run-dir", str(tmp_path / "run")]
    sets = [word for setting in overrides for word in ("--set", setting)]
    assert main(["train", "--config", str(tiny_config), *places, *sets]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
