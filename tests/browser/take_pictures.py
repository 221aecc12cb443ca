"""Takes the pictures of docs/report.md: `take_pictures.py PAGE OUT_DIRECTORY`."""

import sys
from pathlib import Path

from chromium import DESK, PHONE, Scheme, opened

PICTURES: tuple[tuple[str, Scheme, int, int], ...] = (
    ("report_light.png", "light", DESK, 1240),
    ("report_dark.png", "dark", DESK, 1240),
    ("report_phone.png", "light", PHONE, 1240),
)

if __name__ == "__main__":
    page, directory = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    for name, scheme, width, height in PICTURES:
        with opened(page, scheme, width) as tab:
            (directory / name).write_bytes(tab.picture(height))
