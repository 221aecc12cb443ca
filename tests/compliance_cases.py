"""MLCommons' compliance checker, asked in this process."""

from mlperf_logging.compliance_checker import mlp_compliance

RULESETS_WITH_TENSORS = ["2.0.0", "2.1.0"]
RULESETS = [*RULESETS_WITH_TENSORS, "3.0.0", "3.1.0", "4.0.0", "4.1.0", "5.0.0"]


def complies(log, ruleset):
    """True if it accepts a log, warnings taken as errors; what it says is logged."""
    checker = mlp_compliance.make_checker("training", ruleset, False, True)
    try:
        valid, *_ = mlp_compliance.main(str(log), f"training_{ruleset}/common.yaml", checker)
    finally:
        mlp_compliance.enqueued_configs.clear()  # the checker's own global, left over on errors
    return bool(valid)
