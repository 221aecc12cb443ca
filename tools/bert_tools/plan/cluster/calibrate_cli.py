"""The question `plan calibrate`: the simulator beside published runs, and its fit done again."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_tools.plan.cluster.calibration import Compared, PublishedStep
    from bert_tools.plan.cluster.constants import Constants
    from bert_tools.plan.samples_to_target import Estimate

_GOAL = 0.15  # of a class: error that is still called good
_IS_POINT = 1e-3  # of the samples: closer than published ones are rounded
_NUDGE = 0.1  # of a constant, where its weight is shown


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the question."""
    parser.add_argument("--fit", action="store_true", help="fit the constants again (seconds)")
    parser.add_argument(
        "--sensitivity", action="store_true", help="steps with each constant a tenth larger"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(answer=answer_calibrate)


def answer_calibrate(args: argparse.Namespace) -> int:
    """Print the table of errors, fitted and held-out classes apart."""
    from bert_tools.plan.cluster.calibration import compare, fit, published_steps
    from bert_tools.plan.cluster.constants import default_constants

    constants, steps = default_constants(), published_steps()
    fitted = [step for step in steps if step.role == "fitted"]
    report: list[str] = []
    if args.fit:
        constants = fit(constants, fitted, report.append)
    compared = [compare(step, constants) for step in steps]
    weights = _sensitivity(constants, steps) if args.sensitivity else []
    if args.json:
        print(json.dumps(_as_object(constants, compared, weights, report)))
        return 0
    print("\n".join(_in_words(constants, compared, weights, report)))
    return 0


def _sensitivity(
    constants: "Constants", steps: "tuple[PublishedStep, ...]"
) -> list[dict[str, Any]]:
    """By how much every step changes where one constant is a tenth larger."""
    from bert_tools.plan.cluster.calibration import compare
    from bert_tools.plan.cluster.constants import constant_rows

    before = [compare(step, constants).predicted_ms for step in steps]
    found = []
    for row in constant_rows():
        larger = constants.with_value(row.name, (1 + _NUDGE) * getattr(constants, row.name))
        after = [compare(step, larger).predicted_ms for step in steps]
        changes = {
            step.id: new / old - 1 for step, new, old in zip(steps, after, before, strict=True)
        }
        found.append({"constant": row.name, "changes": changes})
    return found


def _as_object(
    constants: "Constants",
    compared: "list[Compared]",
    weights: list[dict[str, Any]],
    report: list[str],
) -> dict[str, Any]:
    from bert_tools.plan.cluster.constants import constant_rows

    rows = []
    for each in compared:
        samples = _samples(each.published)
        rows.append(
            {
                "id": each.published.id,
                "role": each.published.role,
                "accelerators": each.published.world_size,
                "measure": each.published.measure,
                "published_ms": each.published.step_ms,
                "predicted_ms": each.predicted_ms,
                "error": each.error,
                "published_samples": each.published.samples,
                "expected_samples": samples.samples,
                "samples_error": samples.samples / each.published.samples - 1,
            }
        )
    return {
        "schema_version": 1,
        "constants": [
            asdict(row) | {"value": getattr(constants, row.name)} for row in constant_rows()
        ],
        "steps": rows,
        "sensitivity": weights,
        "fit": report,
    }


def _samples(published: "PublishedStep") -> "Estimate":
    """What the recipe's published points say of this batch."""
    from bert_tools.plan.samples_to_target import samples_to_target

    recipe = "open_adam" if published.program.optimizer == "adam" else "closed_lamb"
    return samples_to_target(published.run_inputs.global_batch_size, recipe)


def _samples_error(published: "PublishedStep", expected: "Estimate") -> str:
    """In words; a class that is itself a point of the recipe says nothing."""
    error = expected.samples / published.samples - 1
    if abs(error) < _IS_POINT and expected.source.startswith(published.submitter):
        return "a point"
    return f"{error:+.1%}"


def _in_words(
    constants: "Constants",
    compared: "list[Compared]",
    weights: list[dict[str, Any]],
    report: list[str],
) -> list[str]:
    from bert_tools.plan.cluster.constants import constant_rows
    from bert_tools.plan.cluster.text import table

    values = [
        (
            row.name,
            f"{getattr(constants, row.name):.4g}",
            f"{row.low:g} .. {row.high:g}",
            row.unit,
            row.kind,
        )
        for row in constant_rows()
    ]
    lines = [*report, *table(("constant", "value", "bounds", "unit", "kind"), values), ""]
    names = ("class", "role", "published", "simulated", "error", "samples", "expected", "error")
    cells = []
    for each in compared:
        samples, published = _samples(each.published), each.published
        cells.append(
            (
                f"{published.id} ({published.round})",
                published.role.replace("_", " "),
                f"{published.step_ms:.1f} ms",
                f"{each.predicted_ms:.1f} ms",
                f"{each.error:+.1%}" + (" !" if abs(each.error) > _GOAL else "  "),
                f"{published.samples / 1e6:.2f} M",
                f"{samples.samples / 1e6:.2f} M",
                _samples_error(published, samples),
            )
        )
    lines += table(names, cells)
    for role in ("fitted", "held_out", "other"):
        errors = [abs(each.error) for each in compared if each.published.role == role]
        good = sum(error <= _GOAL for error in errors)
        lines.append(
            f"{role.replace('_', ' ')}: {good} of {len(errors)} within {_GOAL:.0%}, "
            f"mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
        )
    for weight in weights:
        changes = weight["changes"].values()
        lines.append(
            f"{weight['constant']} + {_NUDGE:.0%}: steps change by {min(changes):+.1%} to "
            f"{max(changes):+.1%}"
        )
    return lines
