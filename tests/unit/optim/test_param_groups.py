"""Which parameters are decayed, told by name."""

from torch import nn

from mlperf_bert.optim.param_groups import param_groups


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(2, 2)
        self.key = nn.Linear(2, 2)
        self.LayerNorm = nn.LayerNorm(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_biases_and_layer_norm_are_exempt_and_frozen_parameters_left_out() -> None:
    model = _Block()
    decayed, exempt = param_groups(model, 0.25)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["query.weight", "key.weight"]
    assert [names[id(p)] for p in exempt["params"]] == [
        "query.bias",
        "key.bias",
        "LayerNorm.weight",
        "LayerNorm.bias",
    ]
    assert (decayed["weight_decay"], decayed["layer_adaptation"]) == (0.25, True)
    assert (exempt["weight_decay"], exempt["layer_adaptation"]) == (0.0, False)
