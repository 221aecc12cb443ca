"""Configs: strict reading, round trip, cross-field checks that name the field; their options."""

import re
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.config.files import (
    config_from_tables,
    config_to_tables,
    config_to_toml,
    config_value,
    find_config,
    load_config,
    tables_to_toml,
)
from mlperf_bert.errors import ConfigError
from support import CONFIGS, refusal


def test_round_trip_is_equal(tiny_config, tmp_path):
    config = load_config(tiny_config, ["optim.learning_rate=1e-5", 'mlperf.submission_org=a "b"'])
    again = tmp_path / "again.toml"
    again.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(again) == config


def test_overrides_win_and_are_typed(tiny_config):
    config = load_config(tiny_config, ["run.seed=random", "optim.learning_rate=1", "run.seed=77"])
    assert config.run.seed == 77
    assert config.optim.learning_rate == 1.0


TRAPEZOID = "schedule.form=wsd schedule.cooldown_steps=15"  # up to the end of the warm-up
UNEQUAL = "parallel.local_batch_size=4 data.balance=presort_global data.counts_per_rank=unequal"
CAPTURED = "run.step_mode=captured parallel.ranks_per_node=2"


@pytest.mark.parametrize(
    ("accepted", "more", "words"),
    [
        ("", "run.max_stepz=3", r"unknown setting 'run\.max_stepz'; did you mean run\.max_steps\?"),
        ("", "walk.steps=3", r"unknown setting 'walk\.steps'; did you mean run\.max_steps or "),
        ("", "run.max_steps=3.5", r"run\.max_steps.*an integer"),
        ("", "run.max_steps=true", r"run\.max_steps.*an integer"),
        ("", "run.seed=sometimes", r"run\.seed.*an integer or 'random'"),
        ("", f"run.seed=0x{'f' * 900}", r"run\.seed.*an integer of 3600 bits"),
        ("", "optim.name=sgd", r"optim\.name must be 'adamw', 'lamb' or 'muon', not"),
        ("", "run.max_steps", r"use the form SECTION\.KEY=VALUE"),
        ("", "optim.epsilon=nan", r"optim\.epsilon must be above 0, not nan"),
        (
            "",
            "model.num_heads=3",
            r"model\.num_heads: 3 does not divide model\.hidden_size \(32\)",
        ),
        ("", "data.max_seq_length=64", r"data\.max_seq_length.*32"),
        ("", "schedule.warmup_steps=30", r"schedule\.decay_steps.*warm-up"),
        ("", "data.counts_per_rank=unequal", r"data\.counts_per_rank.*'presort_global'"),
        ("", "model.objective=nsp", r"model\.objective.*'mlm_nsp' or 'mlm'"),
        ("", "model.attention_window=16", r"model\.attention_window.*no effect on BERT"),
        ("", 'run.init_checkpoint="a\\u0000b"', r"run\.init_checkpoint.*printable"),
        ("", "mlperf.submission_org=a\x1b[31m", r"mlperf\.submission_org.*printable"),
        ("", "data.masking=always", r"data\.masking.*'static' or 'dynamic'"),
        ("", "data.masking_rate=0.2", r"data\.masking_rate.*set data.masking to 'dynamic'"),
        (UNEQUAL, "optim.loss_normalization=per_rank", "data.counts_per_rank: .*'per_rank'"),
        (UNEQUAL, "parallel.local_batch_size=5", "data.counts_per_rank: .*local_batch_size of 5"),
        (UNEQUAL, "parallel.local_batch_size=1", "data.counts_per_rank: .*local_batch_size of 1"),
        (UNEQUAL, "data.balance=presort_local", "data.counts_per_rank: .*'presort_local'"),
        (UNEQUAL, "clip.policy=bucket_before_allreduce", "data.counts_per_rank: .*clip"),
        (
            "clip.bucket_limit=equal_share clip.policy=bucket_before_allreduce",
            *(
                "clip.policy=whole_before_allreduce",
                "clip.bucket_limit: 'equal_share' does not work with",
            ),
        ),
        (
            CAPTURED,
            *("clip.policy=bucket_before_allreduce", "data_parallel: 'ddp'.*bucket.* to 'flat'"),
        ),
        (
            "run.step_mode=captured parallel.nodes=2",
            *("clip.policy=whole_before_allreduce", "data_parallel: 'ddp'.*whole.* to 'flat'"),
        ),
        (
            f"{CAPTURED} clip.policy=none",
            *("parallel.allreduce_dtype=bf16", "data_parallel: 'ddp'.*'bf16'.* to 'eager'"),
        ),
        (
            f"{CAPTURED} run.device=cuda model.precision=bf16",
            *("model.precision=fp32", "step_mode: 'captured' .* on 'cuda' .*'fp32'; set .*'bf16'"),
        ),
        (
            f"{CAPTURED} run.device=cuda model.precision=bf16",
            *("model.attention=grouped", "step_mode: 'captured' .*'grouped'; set .*'auto', or "),
        ),
        (
            "optim.implementation=apex run.device=cuda",
            *("model.precision=fp8", "set model.precision to 'fp32', 'bf16_autocast' or 'bf16'"),
        ),
        (
            "run.device=cpu",
            "optim.implementation=apex",
            "'apex' does not work with run.device 'cpu'; set",
        ),
        (
            TRAPEZOID,
            "schedule.cooldown_steps=16",
            "schedule.cooldown_steps: 16 starts the cool-down",
        ),
        (
            TRAPEZOID,
            "schedule.form=published",
            "schedule.cooldown_steps: 15 does not work with schedule.form",
        ),
        (
            "data.skip_samples=5",
            *(
                "data.sampler=stratified_6_3_2_5",
                "data.skip_samples: 5 does not work with data.sampler 'strat",
            ),
        ),
    ],
)
def test_what_does_not_fit_names_field_and_remedy(tiny_config, accepted, more, words):
    load_config(tiny_config, accepted.split())
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tiny_config, [*accepted.split(), more])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("refused", "field", "instead"),
    [
        (
            "run.warm_up_steps=0 parallel.ranks_per_node=2",
            "run.warm_up_steps",
            "run.warm_up_steps=1 parallel.data_parallel=flat parallel.ranks_per_node=1",
        ),
        (
            f"{CAPTURED} clip.policy=bucket_before_allreduce parallel.allreduce_dtype=bf16",
            "parallel.data_parallel",
            "parallel.data_parallel=flat run.step_mode=eager parallel.ranks_per_node=1",
        ),
    ],
)
def test_each_of_some_changes_is_enough(tiny_config, refused, field, instead):
    """Torch's first buckets are for a warm-up step; a hook needs several ranks, and no capture."""
    with pytest.raises(ConfigError, match=f"^{field}: .* does not work with "):
        load_config(tiny_config, refused.split())
    for change in instead.split():
        load_config(tiny_config, [*refused.split(), change])


@pytest.mark.parametrize(("rate", "needed"), [("0.3", 9), ("0.16", 5), ("0.4", 12)])
def test_masks_at_a_rate_want_room(tiny_config, rate, needed):
    dynamic = ("data.masking=dynamic", f"data.masking_rate={rate}")
    assert load_config(tiny_config, (*dynamic, f"data.max_predictions={needed}"))
    with pytest.raises(ConfigError, match=f"^data.max_predictions: .*needs {needed};"):
        load_config(tiny_config, (*dynamic, f"data.max_predictions={needed - 1}"))


@pytest.mark.parametrize("text", ["run = 3", "[run", "[run]\nmax_steps = 1\n[optim]\n", "\x00"])
def test_broken_files_are_config_errors(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(path)


def test_a_setting_that_is_gone_may_have_the_value_that_is_left(tiny_config, tmp_path):
    now = load_config(tiny_config)
    gone = ("optim.initial_loss_scale=1024.0", "optim.loss_scale_growth_steps=7")
    gone += ("clip.accumulation=accumulated", "run.init_checkpoint_sha256=''")
    gone += ("model.type_vocab_size=2", "optim.momentum=0.95", "schedule.power=1")
    gone += ("clip.bucket_count=22", "eval.tokens_per_forward=600", "data.dupe_factor=10")
    gone += ("checkpoint.save=end", "data.quantiles=auto", "data.deal=snake", "data.cost_a=2.0")
    gone += ("data.balance_model=tokens", "data.cost_b=flops", "run.straggler_factor=1.5")
    assert load_config(tiny_config, gone) == now
    for other in (
        *("clip.accumulation=each_forward", "schedule.power=2", "clip.bucket_count=5"),
        *("model.type_vocab_size=4", "optim.momentum=0.9", "run.init_checkpoint_sha256='00'"),
        *("data.dupe_factor=1", "data.dupe_factor=7", "checkpoint.save=often"),
    ):
        with pytest.raises(ConfigError, match=f"unknown setting '{other.partition('=')[0]}'"):
            load_config(tiny_config, [other])
    never = load_config(tiny_config, ["checkpoint.save=never"])
    assert never.checkpoint.interval_steps == "never"
    tables = config_to_tables(now)
    tables["model"]["head"] = "full"
    assert config_from_tables(tables, "old") == now
    tables["model"]["head"] = "chunked"  # the program computes it no more
    (tmp_path / "old.toml").write_text(tables_to_toml(tables))
    with pytest.raises(ConfigError, match=r"unknown setting 'model\.head'"):
        load_config(tmp_path / "old.toml")


@pytest.mark.parametrize(
    ("global_batch_size", "interval"),
    [(448, 150_000), (3072, 175_000), (4608, 200_000), (16384, 325_000), (16416, 325_000)],
)
def test_mlperf_evaluation_interval(tiny_config, global_batch_size, interval):
    overrides = [f"parallel.local_batch_size={global_batch_size}", "eval.interval_samples=mlperf"]
    assert load_config(tiny_config, overrides).eval_interval_samples == interval


@pytest.mark.parametrize(
    "override",
    [
        *("optim.name=adamw", "eval.target_accuracy=0.71", "eval.interval_samples=1000"),
        *("data.sampler=stratified_4_2_2_4", "data.corpus=embedded", "data.max_seq_length=128"),
        *("model.num_layers=12", "model.hidden_dropout=0.0", "parallel.local_batch_size=16385"),
        *("clip.policy=none", "clip.policy=bucket_before_allreduce", "clip.max_norm=5.0"),
        *("model.objective=mlm", "data.masking=dynamic", "eval.target_accuracy=none"),
        *("schedule.form=wsd", "data.skip_samples=448", "run.init_state=training"),
    ],
)
def test_closed_division_rules(override):
    closed = CONFIGS / "h200_1x1x448x1.toml"
    field = re.escape(override.partition("=")[0])
    with pytest.raises(ConfigError, match=f"^{field}: .* closed division"):
        load_config(closed, [override])
    assert load_config(closed, [override, "mlperf.enforce_rules=false"])
    assert load_config(closed, [override, "mlperf.division=open"])


def test_what_the_closed_division_leaves_free():
    closed = CONFIGS / "h200_1x1x448x1.toml"
    for override in (
        *("clip.policy=whole_before_allreduce", "parallel.local_batch_size=16384"),
        *("eval.target_accuracy=0.73", "data.balance=presort_global"),
    ):
        assert load_config(closed, [override]).max_steps == 6700  # as its schedule says
    assert load_config(closed, ["run.max_steps=7"]).max_steps == 7


def test_config_value_reads_properties_only(tiny_config):
    config = load_config(tiny_config)
    assert config_value(config, "parallel.global_batch_size") == 16
    with pytest.raises(ConfigError, match="unknown setting"):
        config_value(config, "parallel.__class__")


def test_a_shipped_config_is_found_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for given in ("cpu_tiny", str(CONFIGS / "cpu_tiny.toml")):
        assert main(["config", "get", given, "run.max_steps"]) == 0
    assert capsys.readouterr().out == "3000\n3000\n"
    Path("cpu_tiny").write_text("[run]\nmax_steps = 7\n")
    assert find_config("cpu_tiny") == Path("cpu_tiny")  # a file that is there comes first


def test_an_unknown_name_says_which_there_are(capsys):
    for given, remedy in (
        ("cpu_tinny", "did you mean cpu_tiny, bert_cpu_tiny or encoder_cpu_tiny?"),
        ("zzz", f"the shipped configs are in {CONFIGS}"),
    ):
        error = refusal(capsys, "train", "--config", given, "--data", ".")
        assert error.startswith(f"mlperf_bert: error: {given}: no such file or shipped config; ")
        assert error.endswith(f"{remedy}\n")
    assert "nowhere.toml" in refusal(capsys, "config", "show", "nowhere.toml")
