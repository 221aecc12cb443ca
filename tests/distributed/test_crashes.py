"""An error that nobody expects, on one rank of two: it is said at once, and both ranks end soon.

No launcher is there to end the other one. What a launcher does: test_ranks.py.
"""

import re
from itertools import product

import pytest

from crashing_rank import PLACES, SAID, crash_a_run

POLICIES = ("none", "exchange_global", "exchange_local")
SHORTEST = [("exchange_global", place) for place in ("loader", "forward", "save")]
ALL = [(policy, place) for policy, place in product(POLICIES, PLACES)]
MOST_S = 30.0  # from the error to the last rank's end
CRASHED, LOST = 1, 70


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        *SHORTEST,
        *(pytest.param(*each, marks=pytest.mark.longest) for each in ALL if each not in SHORTEST),
    ],
)
def test_both_ranks_end_and_the_first_line_is_the_cause(
    tiny_config, synthetic_data, tmp_path, policy, place
):
    crash = crash_a_run(tiny_config, synthetic_data, tmp_path, policy, place)
    assert crash.seconds <= MOST_S
    assert crash.statuses == [LOST, CRASHED], crash.printed
    said, told, _ = crash.printed.partition("Traceback")
    assert told
    first, *_ = re.findall(r"^mlperf_bert: error: (.*)$", said, re.MULTILINE)
    assert re.fullmatch(rf"rank 1 on \S+, [\w ]+: RuntimeError: {SAID}", first), crash.printed
