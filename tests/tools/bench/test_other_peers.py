"""`transformers` without padding equals itself with it; what cannot run, or is another model."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_tools.bench import other_peers
from bert_tools.bench.against import make_ours
from bert_tools.bench.contenders import Data, make_data
from bert_tools.bench.other_peers import OtherPeers, make_other_peers
from bert_tools.bench.peer import make_peer
from bert_tools.bench.unpadded_peer import unpadded_inputs, unpadded_loss, use_nested_attention
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection

CPU = torch.device("cpu")
TINY = ModelSection(
    vocab_size=101,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    max_position_embeddings=24,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@pytest.fixture
def data() -> Data:
    return make_data(TINY, num_batches=2, batch_size=4, seed=1, device=CPU)


@pytest.fixture
def make() -> Callable[[], Any]:
    ours = make_ours(TINY, 1, CPU)
    return lambda: make_peer(ours, TINY, CPU)


def others(
    make: Callable[[], Any],
    data: Data,
    *,
    check: Callable[[Tensor], object] = lambda _: None,
    with_compile: bool = False,
) -> OtherPeers:
    return make_other_peers(
        make,
        data,
        "fp32",
        device=CPU,
        with_compile=with_compile,
        check=check,
        report=lambda _: None,
    )


def allow_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_peers, "_reason_against", lambda *_: None)


def test_without_padding_loss_and_gradients_are_the_same(
    make: Callable[[], Any], data: Data
) -> None:
    padded, unpadded = make().eval(), make().eval()
    use_nested_attention(unpadded)
    for number, batch in enumerate(data.batches):
        losses = (
            padded(**data.padded[number]).loss,
            unpadded_loss(unpadded, unpadded_inputs(batch)),
        )
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    gradients = dict(unpadded.named_parameters())
    for name, parameter in padded.named_parameters():
        # Padding is a word to the padded model, and the embedding's row of it gets no gradient.
        torch.testing.assert_close(
            gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )


def test_dropout_reaches_the_attention_without_padding(make: Callable[[], Any], data: Data) -> None:
    peer = make()
    use_nested_attention(peer)
    inputs = unpadded_inputs(data.batches[0])
    without = [unpadded_loss(peer, inputs).item() for _ in range(2)]
    peer.bert.encoder.layer[0].attention.self.dropout.p = 0.5
    assert without[0] == without[1]
    assert unpadded_loss(peer, inputs).item() != pytest.approx(without[0], rel=1e-6)


def test_all_that_can_run_train(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    allow_on_cpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)  # takes a minute
    monkeypatch.setattr(
        other_peers, "FUSED", list(torch.nn.attention.SDPBackend.__members__.values())
    )
    checked: list[float] = []
    found = others(make, data, check=lambda loss: checked.append(loss.item()), with_compile=True)
    assert found.reasons == {}
    assert list(found.contenders) == list(other_peers.BUILDERS)
    assert checked == pytest.approx([checked[0]] * 2)
    for contender in found.contenders.values():
        losses = [contender(0).item() for _ in range(5)]
        assert losses[-1] < losses[0]


def test_what_fails_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nand a stack")

    allow_on_cpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", fail)
    found = others(make, data, with_compile=True)
    assert found.reasons["padded_compiled"] == "RuntimeError: no kernel"
    assert "unpadded_peer" in found.contenders


def test_what_runs_out_of_memory_is_freed_before_the_next(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    peers: list[weakref.ref[Any]] = []

    def make_noted() -> Any:
        assert all(peer() is None for peer in peers[:1])
        peer = make()
        peers.append(weakref.ref(peer))
        return peer

    def fill(module: Any, **_: object) -> Any:
        def call(**inputs: Any) -> Any:
            assert module(**inputs).loss > 0
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

        return call

    allow_on_cpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", fill)
    found = others(make_noted, data, with_compile=True)
    assert found.reasons["padded_compiled"] == "out of memory (tried to allocate 9 GiB)"
    assert len(peers) == 3 and "unpadded_peer" in found.contenders


def test_another_model_is_no_reason_but_an_error(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    def refuse(_: Tensor) -> None:
        raise ConfigError("bench against", "another model", "use this one")

    allow_on_cpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    with pytest.raises(ConfigError, match="another model"):
        others(make, data, check=refuse)
