"""`bench optimizer` on a tiny model: who is compared, that weights agree, what is reported."""

import pytest
import torch
from bench_cases import CPU, assert_held, measured, tiny

from bert_tools.bench.optimizer import REFERENCE, RULES, check_same_weights, make_updaters
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining

MODERN = ("model.architecture=modern", "model.objective=mlm", "model.intermediate_size=64")


def test_json_has_a_row_for_each_updater(snapshot):
    result, _, progress = measured("optimizer", "--steps", 2)
    model = BertForPretraining(tiny().model, torch.device("meta"), seed=0)
    assert result["parameters"] == sum(each.numel() for each in model.parameters())
    rows = {(row["rule"], row["updater"]): row for row in result["rows"]}
    for (rule, _), row in rows.items():
        assert row["ratio"] == pytest.approx(rows[rule, REFERENCE]["ms"] / row["ms"])
        assert 0 <= row["largest_difference"] <= result["largest_difference_allowed"]
    assert_held(result, snapshot)
    assert "building the model for adamw, rule 2 of 2\n" in progress and "step 2/2" in progress


@pytest.mark.parametrize("settings", [(), MODERN], ids=["bert", "modern"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_updater_moves_the_weights_equally(rule, settings):
    model = BertForPretraining(tiny(*settings).model, CPU, seed=1)
    before = [each.detach().clone() for each in model.parameters()]
    updaters, new_gradients = make_updaters(model, rule, seed=1)
    for _ in range(3):
        new_gradients(0)
        for updater in updaters.values():
            updater.run(0)
    check_same_weights(rule, updaters)
    for name, updater in updaters.items():
        pairs = zip(updater.weights, before, strict=True)
        assert all(not torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize("spoilt_by", [1e-5, float("nan")])
def test_other_weights_are_refused(spoilt_by):
    model = BertForPretraining(tiny().model, CPU, seed=1)
    updaters, _ = make_updaters(model, RULES[0], seed=1)
    updaters["flat buffers"].weights[-1].view(-1)[0] += spoilt_by
    with pytest.raises(ConfigError, match="lamb, the weights of flat buffers differ by"):
        check_same_weights(RULES[0], updaters)
