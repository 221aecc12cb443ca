"""The published study: its figures, and what follows from them, derived here by hand."""

import pytest

from bert_tools.squad.study import published_study
from bert_tools.squad.study_text import study_in_words

BASELINE, TWO, FOUR = published_study()


def test_goodput_is_rate_times_efficiency_in_every_row() -> None:
    # 37.98 * 0.01627 = 0.61793; 70.40 * 7.07e-5 = 0.0049773; 116.27 * 1.116e-4 = 0.012976
    products = [row.product for row in (BASELINE, TWO, FOUR)]
    assert products == pytest.approx([0.61793, 0.0049773, 0.012976], rel=1e-4)
    for row in (BASELINE, TWO, FOUR):
        assert row.goodput == pytest.approx(row.product, rel=0.02)  # as far as it is rounded


def test_samples_and_samples_per_update() -> None:
    # 37.98 * 3688 = 140,070; 70.40 * 3148 = 221,619; 116.27 * 1930.19 = 224,423
    assert [round(row.samples) for row in (BASELINE, TWO, FOUR)] == [140_070, 221_619, 224_423]
    # by 5,430, 6,735 and 3,340 updates
    per_update = [row.samples_per_update for row in (BASELINE, TWO, FOUR)]
    assert per_update == pytest.approx([25.80, 32.91, 67.19], abs=0.01)


def test_no_published_efficiency_follows_from_the_definition() -> None:
    # (phi + M0) / (phi + M) rises with phi and with M0: at phi = 0, M0 = 1 it is 1 / M.
    for row in (BASELINE, TWO, FOUR):
        for noise in (0.0, 1.0, 1e3):
            for initial in range(1, row.global_batch + 1):
                allowed = (noise + initial) / (noise + row.global_batch)
                assert allowed >= row.least_efficiency > row.efficiency


def test_what_the_conjecture_explains_and_what_not() -> None:
    # Scale M * M0 = 16 * 16, 32 * 16, 64 * 16: at least 1/256 = 0.0039, 1/512, 1/1024.
    least = [row.least_of_product(16) for row in (BASELINE, TWO, FOUR)]
    assert least == pytest.approx([1 / 256, 1 / 512, 1 / 1024])
    assert BASELINE.efficiency > least[0]
    assert TWO.efficiency < least[1]
    assert FOUR.efficiency < least[2]


def test_the_words_have_the_studys_own_differences() -> None:
    text = "\n".join(study_in_words())
    for published in ("-14.64 %", "+85.36 %", "-47.66 %", "+206.13 %"):
        assert published in text
    assert "25.8 / 32.9 / 67.2" in text
    assert "140k / 222k / 224k" in text
    assert "conjecture" in text


def test_json_has_published_and_computed_figures() -> None:
    found = TWO.as_json()
    assert found["samples_per_s"] == 70.40
    assert found["samples_per_update"] == pytest.approx(32.91, abs=0.01)
