"""Around the submission: plan, tune, report, watch, bench, doctor, convert, package, squad."""
