"""Print the pages of a commit as a tree with words: `pages.py COMMIT`.

Logs and decisions are only sums.
"""

import subprocess
import sys
from collections import Counter


def git(*words: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


commit = sys.argv[1]
sums: Counter[str] = Counter()
total, folder = 0, ""
for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
    if not path.endswith(".md") or path.startswith(("tests/", "results/")):
        continue
    words = len(git("show", f"{commit}:{path}").split())
    for start in ("logs/2026", "docs/decisions/"):
        if path.startswith(start):
            sums[start] += words
            break
    else:
        total += words
        here, _, name = path.rpartition("/")
        if here != folder:
            print(f"{here}/")
            folder = here
        print(f"  {name:28} {words:6,}")
print(f"all of these {total:,} words; " + ", ".join(f"{name}* {n:,}" for name, n in sums.items()))
