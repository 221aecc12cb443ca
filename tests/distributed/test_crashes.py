"""An error that nobody expects, on one rank of two: it is said at once, and both ranks end soon.

No launcher is there to end the other one. What a launcher does: test_ranks.py.
"""

import re
import time
from itertools import product
from pathlib import Path

import pytest

from crashing_rank import PLACES, SAID
from forked_ranks import run_ranks

POLICIES = ("none", "exchange_global", "exchange_local")
SHORTEST = [("exchange_global", place) for place in ("loader", "forward", "save")]
ALL = [(policy, place) for policy, place in product(POLICIES, PLACES)]
MOST_S = 30.0  # from the error to the last rank's end
SETTINGS = (
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=8", "run.max_steps=40"),
    *("schedule.decay_steps=40", "checkpoint.interval_steps=3", "eval.interval_samples=64"),
)
CRASHED, LOST = 1, 70


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        *SHORTEST,
        *(pytest.param(*each, marks=pytest.mark.longest) for each in ALL if each not in SHORTEST),
    ],
)
def test_both_ranks_end_and_the_first_line_is_the_cause(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path, policy: str, place: str
) -> None:
    words = ["train", "--config", tiny_config, "--data", synthetic_data, "--run-dir", tmp_path]
    for setting in (*SETTINGS, f"data.balance={policy}"):
        words += ["--set", setting]
    script = Path(__file__).with_name("crashing_rank.py")
    statuses, printed = run_ranks(script, (place, *words), 2, timeout_s=100)
    ended = time.time()
    crashed = re.search(r"crashed at ([\d.]+)", printed)
    assert crashed, printed
    assert ended - float(crashed[1]) <= MOST_S
    assert statuses == [LOST, CRASHED], printed
    first, *_ = re.findall(r"^mlperf_bert: error: (.*)$", printed[crashed.start() :], re.MULTILINE)
    assert re.fullmatch(rf"rank 1 on \S+, [\w ]+: RuntimeError: {SAID}", first), printed
    assert "Traceback" in printed
