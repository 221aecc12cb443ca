"""Take the pictures of docs/guides/watch_and_report.md: `take_pictures.py ONE TWO DIRECTORY`."""

import sys
from pathlib import Path

from chromium import DESK, PHONE, opened

PICTURES = (  # which page, file, scheme, pixels
    (1, "report_light.png", "light", DESK, 1280),
    (0, "report_dark.png", "dark", DESK, 1280),
    (0, "report_phone.png", "light", PHONE, 1280),
)

if __name__ == "__main__":
    *pages, directory = map(Path, sys.argv[1:])
    for number, name, scheme, width, height in PICTURES:
        with opened(pages[number].resolve(), scheme, width) as tab:
            (directory / name).write_bytes(tab.picture(height))
