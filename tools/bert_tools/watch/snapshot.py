"""One moment of a watched run as JSON."""

from dataclasses import asdict
from typing import Any

from bert_tools.watch.frame import state
from bert_tools.watch.look import Look

SCHEMA_VERSION = 1


def snapshot(look: Look) -> dict[str, Any]:
    """For programs; keys are only added. Times are in seconds."""
    history, remaining = look.history, look.remaining
    low, high = remaining.to_target_s or (None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": look.name,
        "phase": look.phase,
        "state": state(look),
        "max_steps": look.config.max_steps if look.config else None,
        "target_accuracy": look.config.eval.target_accuracy if look.config else None,
        "last_record": None if history.last is None else dict(history.last),
        "last_accuracy": history.evaluations[-1].accuracy if history.evaluations else None,
        "best_accuracy": history.best_accuracy,
        "skipped_steps": history.skipped_steps,
        "trained_s": history.trained_s,
        "silent_s": look.silent_s,
        "to_last_step_s": remaining.to_last_step_s,
        "to_target_s": {"low": low, "high": high, "basis": remaining.basis},
        "outcome": None if look.outcome is None else asdict(look.outcome),
        "alerts": [asdict(alert) for alert in look.alerts],
    }
