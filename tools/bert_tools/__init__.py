"""The tools around the submission: plan, tune, report, bench, doctor, convert, package, squad."""
