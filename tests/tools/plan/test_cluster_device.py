"""Device times of the cluster simulator: waves of tiles, squares of lengths, bytes and rates."""

from dataclasses import replace

import numpy as np
import pytest

from bert_tools.plan.cluster.device import Device, embedding_ms, head_ms, layer_ms
from bert_tools.plan.cluster.machine import accelerators
from cluster_cases import EAGER, FREE, even

A100 = Device(accelerators()["a100"], "bf16", FREE)
RATE = 312e12 * FREE.matrix_efficiency / 108  # operations a second of one multiprocessor


def product_ms(rows: int, columns: int, inner: int) -> float:
    return float(A100.product_ms(np.array([float(rows)]), columns, inner)[0])


def test_a_product_takes_whole_waves_of_tiles() -> None:
    one_tile = 1e3 * 2 * 128 * 128 * 1024 / RATE
    assert product_ms(128, 128, 1024) == pytest.approx(one_tile)
    assert product_ms(1, 128, 1024) == pytest.approx(one_tile)
    assert product_ms(108 * 128, 128, 1024) == pytest.approx(one_tile)
    assert product_ms(108 * 128 + 1, 128, 1024) == pytest.approx(2 * one_tile)


def test_3456_tokens_fill_waves_that_3457_do_not() -> None:
    # 27 rows of tiles times 8 columns are 216 tiles: two full waves of 108.
    assert product_ms(3456, 1024, 1024) * 1.5 == pytest.approx(product_ms(3457, 1024, 1024))


def test_more_tokens_are_never_quicker() -> None:
    times = [product_ms(tokens, 4096, 1024) for tokens in range(64, 9000, 64)]
    assert times == sorted(times)


def test_attention_grows_with_the_square_of_the_length() -> None:
    def attention(length: int) -> float:
        work = even(1, sequences=4096 // length, length=length)
        return float(A100.attention_ms(work.attended, 1024, 2)[0])

    # The same tokens: pairs double with the length.
    assert attention(512) == pytest.approx(2 * attention(256))


def test_memory_is_bytes_over_bandwidth() -> None:
    expected = 1e3 * 5e9 / (2039e9 * FREE.memory_efficiency)
    assert float(A100.memory_ms(5e9)) == pytest.approx(expected)


def test_activations_of_fp32_are_twice_as_wide() -> None:
    work = even(1, sequences=16, length=256)
    wide, narrow = (
        float(embedding_ms(replace(A100, precision=name), work.tokens)[0][0])
        for name in ("fp32", "bf16")
    )
    assert wide == pytest.approx(2 * narrow)


def test_a_layer_is_not_below_its_multiply_adds() -> None:
    work = even(1, sequences=16, length=256)
    layer = layer_ms(A100, EAGER, work, work.tokens)
    operations = 2 * 4096 * (4 * 1024**2 + 2 * 1024 * 4096)
    least = 1e3 * operations / (312e12 * FREE.matrix_efficiency)
    assert float(layer[0][0]) > least
    assert float(layer[1][0]) > 2 * least


def test_the_head_over_all_positions_costs_more() -> None:
    masked, everything = (head_ms(A100, np.array([rows])) for rows in (160.0, 1024.0))
    assert all(more[0] > less[0] for more, less in zip(everything, masked, strict=True))


def test_data_sheets_have_a_source_each() -> None:
    for accelerator in accelerators().values():
        assert "data sheet" in accelerator.source
        assert accelerator.peak_tflops("bf16") == accelerator.peak_tflops("fp16") > 0
    assert accelerators()["a100"].peak_tflops("fp8") == 0
