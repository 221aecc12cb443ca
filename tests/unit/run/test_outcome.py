"""What the last line of a run says about how it ended."""

from dataclasses import replace

from mlperf_bert.run.outcome import RunOutcome

REACHED = RunOutcome(
    status="success", steps=750, samples=24_000, seconds=41.2, mlm_accuracy=0.3, stopped_by=None
)
HOW_FAR = "24,000 samples, 750 steps, 41.2 s of training"


def test_each_end_has_its_words():
    assert REACHED.in_words(0.3, 0.15) == f"target reached after {HOW_FAR}"
    missed = replace(REACHED, status="aborted").in_words(0.5, 0.15)
    assert missed.startswith(f"target NOT reached after {HOW_FAR}; accuracy 0.3000 of 0.5; ")
    too_early = replace(REACHED, status="aborted").in_words(0.3, 0.15)
    assert too_early.startswith(f"target NOT reached after {HOW_FAR}; accuracy 0.3000 of 0.3, but")
    stopped = replace(REACHED, status="aborted", stopped_by="SIGTERM").in_words(0.5, 0.15)
    assert stopped == f"stopped by SIGTERM after {HOW_FAR}; accuracy 0.3000"
    without_target = REACHED.in_words(None, 0.15)
    assert without_target.endswith("; accuracy 0.3000, 2.00 x the context-free baseline")
    assert "target" not in without_target
