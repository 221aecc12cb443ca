"""Alarms from a run's metrics: the loss diverges, accuracy collapses, or steps are skipped.

Each kind raises one alarm until it has recovered. The rules use smoothed values: half the weight
lies on the last three records, nine tenths on the last ten.
"""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlperf_bert.common.errors import CheckpointError

AlarmKind = Literal["not_finite", "diverged", "collapsed", "skipped"]

SMOOTHING = 0.8  # weight of the past, at each record
SETTLED = 5  # records until a smoothed loss is worth comparing
RISEN, FALLEN_BACK = 1.25, 1.1  # smoothed loss over its best: diverged above, recovered below
NOISE_WIDTHS = 4.0  # multiple of the loss's noise, which a rise must exceed too
STAYS = 3  # records
ACCURACY_DROP, ACCURACY_SHARE = 0.02, 0.1  # below the best: absolute, and relative
STANDARD_ERRORS = 5.0
MASKED_TOKENS_IF_UNKNOWN = 1_000
SKIPPED_SHARE, SKIPPED_SHARE_PASSED, SKIPPED_LEAST = 0.1, 0.02, 3.0
_MEND = "lower optim.learning_rate or lengthen schedule.warmup_steps"
_MEND_OVERFLOW = f"{_MEND}; in fp16 also lower optim.initial_loss_scale, or use bf16"


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm: its kind, what was seen, and the remedy."""

    kind: AlarmKind
    seen: str
    remedy: str

    @property
    def line(self) -> str:
        """The alarm in one line."""
        return f"{self.seen}; {self.remedy}"


class Health:
    """Checks the records of `metrics.jsonl` in order.

    - not_finite: the loss is NaN, infinite or null.
    - diverged: for three records the loss and the smoothed loss are 25 % above the best smoothed
      one, and above it by four times its noise then (smoothed distance of single records from
      it), so noise or one jump raises no alarm. Over when smoothed within 10 %.
    - collapsed: an evaluation is below the best one by 0.02, by a tenth of that, and by five
      standard errors of the difference of two accuracies (binomial). Over when one is not.
    - skipped: of the last steps, smoothed, three or more and a tenth were skipped. Over at 2 %;
      a loss scale that finds its level skips a step now and then.
    """

    def __init__(self, masked_tokens: int | None) -> None:
        """`masked_tokens` of the held-out set give the noise of an accuracy; None if not known."""
        self._masked_tokens = masked_tokens or MASKED_TOKENS_IF_UNKNOWN
        self._values: dict[str, float] = dict.fromkeys(_NAMES, 0.0)

    def alarms(self, record: Mapping[str, Any]) -> list[Alarm]:
        """Alarms of one record, from its `step`, `loss`, `mlm_accuracy` and `skipped_steps`."""
        found = [
            self._judge_loss(record["step"], record["loss"]),
            self._judge_accuracy(record["step"], record["mlm_accuracy"]),
            self._judge_skipped(record["step"], record["skipped_steps"]),
        ]
        return [alarm for alarm in found if alarm is not None]

    def state(self) -> dict[str, float]:
        """The state that a resumed run needs to raise the same alarms; finite numbers."""
        return dict(self._values)

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state()`, or start afresh from an empty one.

        Raises CheckpointError if it is neither.
        """
        is_state = set(state) in (set(), set(_NAMES)) and all(
            type(value) in (int, float) and math.isfinite(value) for value in state.values()
        )
        if not is_state:
            problem = "is not what this version saves"
            raise CheckpointError("state of health", problem, "resume from another checkpoint")
        self._values = {name: float(state.get(name, 0.0)) for name in _NAMES}

    def _judge_loss(self, step: int, loss: float | None) -> Alarm | None:
        is_number = loss is not None and math.isfinite(loss)
        if self._changed("not_finite", raised=not is_number, over=is_number):
            return Alarm("not_finite", f"step {step}: the loss is no number", _MEND_OVERFLOW)
        if loss is None or not is_number:
            return None
        values = self._values
        self._smooth(loss)
        smoothed, best = values["loss"], values["best_loss"]
        limit = max(best * RISEN, best + NOISE_WIDTHS * values["best_loss_noise"])
        values["risen"] = values["risen"] + 1 if min(loss, smoothed) > limit else 0.0
        stays, is_back = values["risen"] >= STAYS, smoothed <= best * FALLEN_BACK
        if not self._changed("diverged", raised=stays, over=is_back):
            return None
        seen = f"step {step}: the loss diverges: smoothed {smoothed:.3f}, {best:.3f} at its best"
        return Alarm("diverged", seen, _MEND)

    def _smooth(self, loss: float) -> None:
        values = self._values
        is_first = values["losses"] == 0
        values["losses"] += 1
        off = 0.0 if is_first else abs(loss - values["loss"])
        values["loss_noise"] = SMOOTHING * values["loss_noise"] + (1 - SMOOTHING) * off
        keep = 0.0 if is_first else SMOOTHING
        values["loss"] = keep * values["loss"] + (1 - keep) * loss
        if values["losses"] <= SETTLED or values["loss"] < values["best_loss"]:
            # The noise at the best loss: a diverging loss is far from its smoothed value.
            values["best_loss"], values["best_loss_noise"] = values["loss"], values["loss_noise"]

    def _judge_accuracy(self, step: int, accuracy: float | None) -> Alarm | None:
        if accuracy is None:
            return None
        best = self._values["best_accuracy"] = max(self._values["best_accuracy"], accuracy)
        error = math.sqrt((best * (1 - best) + accuracy * (1 - accuracy)) / self._masked_tokens)
        drop = max(ACCURACY_DROP, ACCURACY_SHARE * best, STANDARD_ERRORS * error)
        fallen = accuracy < best - drop
        if not self._changed("collapsed", raised=fallen, over=not fallen):
            return None
        seen = f"step {step}: the accuracy collapsed to {accuracy:.4f} from {best:.4f} at its best"
        return Alarm("collapsed", seen, f"{_MEND}, and go on from an earlier checkpoint")

    def _judge_skipped(self, step: int, skipped: int) -> Alarm | None:
        values = self._values
        steps = step - values["step"]
        values["step"] = step
        values["skipped_steps"] += skipped
        values["recent_steps"] = SMOOTHING * values["recent_steps"] + steps
        values["recent_skipped"] = SMOOTHING * values["recent_skipped"] + skipped
        share = values["recent_skipped"] / max(1.0, values["recent_steps"])
        many = share > SKIPPED_SHARE and values["recent_skipped"] >= SKIPPED_LEAST
        if not self._changed("skipped", raised=many, over=share <= SKIPPED_SHARE_PASSED):
            return None
        total = int(values["skipped_steps"])
        seen = f"step {step}: {share:.0%} of the last steps were skipped, {total} in all"
        return Alarm("skipped", f"{seen}, because a gradient was not finite", _MEND_OVERFLOW)

    def _changed(self, kind: AlarmKind, *, raised: bool, over: bool) -> bool:
        """True if an alarm of the kind is due now; it is armed again when `over`."""
        was_raised = bool(self._values[kind])
        if raised or over:
            self._values[kind] = float(raised)
        return raised and not was_raised


_NAMES = (
    *("step", "losses", "loss", "loss_noise", "best_loss", "best_loss_noise", "risen"),
    *("best_accuracy", "skipped_steps", "recent_steps", "recent_skipped"),
    *typing.get_args(AlarmKind),
)
