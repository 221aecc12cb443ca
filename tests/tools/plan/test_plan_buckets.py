"""`mlperf_bert plan buckets`: the model and the backward that it is planned by."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bert_tools.plan.buckets import backward_order
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.layers import pretraining_loss
from mlperf_bert.step.captured import synthetic_batch
from model_cases import loss_sums


def backward_of(config, dtype):
    """Share of backward's FLOPs done when each gradient is whole, in that order."""
    model = BertForPretraining(config.model, torch.device("cpu")).to(dtype)
    done = {}
    with FlopCounterMode(display=False) as flops:
        batch = synthetic_batch(config)
        loss = pretraining_loss(loss_sums(model(batch), batch), batch)
        of_micro_batch = flops.get_total_flops()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: done.update({name: flops.get_total_flops() - of_micro_batch})
            )
        loss.backward()
        total = flops.get_total_flops() - of_micro_batch
    return {name: count / total for name, count in done.items()}


def test_gradients_are_ready_in_the_planned_order(tiny_config):
    for attention, dtype in (("reference", torch.float32), ("grouped", torch.bfloat16)):
        config = load_config(tiny_config, (f"model.attention={attention}",))
        planned = [each.name for each in backward_order(config.model, 64, 10)]
        assert list(backward_of(config, dtype)) == planned


def test_shares_of_backward_are_those_of_torchs_flop_count(tiny_config):
    config = load_config(tiny_config, ("model.attention=reference", "model.num_layers=3"))
    counted = backward_of(config, torch.float32)
    data = config.data
    planned = backward_order(config.model, data.max_seq_length, data.max_predictions)
    assert {each.name: each.ready_at for each in planned} == pytest.approx(counted, rel=1e-12)


def test_sizes_are_those_of_the_real_model():
    for changes in ({}, {"vocab_size": 1001, "num_layers": 2}, {"objective": "mlm"}):
        model = ModelSection(attention="reference", **changes)
        real = BertForPretraining(model, torch.device("meta"))
        numels = {name: parameter.numel() for name, parameter in real.named_parameters()}
        assert {each.name: each.numel for each in backward_order(model, 512, 76)} == numels
