"""Evaluation on a GPU: captured equals eager, also after the weights have changed."""

import torch

from graph_cases import evaluator_of, small_model


def device():
    return torch.device("cuda", torch.cuda.device_count() - 1)


def model(seed):
    sizes = {"hidden_size": 128, "num_layers": 2, "intermediate_size": 256}
    # Attention is measured once a model, "auto" could choose two.
    return small_model(seed, device(), **sizes, attention="triton", precision="bf16").bfloat16()


def test_a_captured_evaluation_equals_an_eager_one(synthetic_data):
    trained = model(1)
    options = {"device": device(), "precision": "bf16"}
    captured, eager = (
        evaluator_of(synthetic_data, step_mode=mode, **options) for mode in ("captured", "eager")
    )
    captured.prepare(trained)
    found = []
    with captured:
        for seed in (1, 2):
            with torch.no_grad():
                trained.load_state_dict(model(seed).state_dict())
            found.append(captured(trained))
            assert found[-1] == eager(trained)
    assert found[0] != found[1]
