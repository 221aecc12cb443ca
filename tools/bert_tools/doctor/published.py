"""What MLPerf's submitters reached on an accelerator, by its name (published_rates.csv)."""

import csv
import re
from dataclasses import dataclass
from importlib import resources

_FILE = "published_rates.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRate:
    """Sequences a second of one accelerator in the best published run on `accelerators` of them."""

    accelerator: str
    end_to_end: float
    train_only: float | None
    accelerators: int
    global_batch_size: int
    round: str
    submitter: str

    @property
    def best(self) -> float:
        """Without evaluation where the logs tell it."""
        return self.train_only or self.end_to_end


def published_rate(device_name: str) -> PublishedRate | None:
    """The best published rate of the accelerator that torch names so; None where it is unknown."""
    for row in _rows():
        if re.search(row["pattern"], device_name, re.IGNORECASE):
            return PublishedRate(
                accelerator=row["accelerator"],
                end_to_end=float(row["end_to_end"]),
                train_only=float(row["train_only"]) if row["train_only"] else None,
                accelerators=int(row["accelerators"]),
                global_batch_size=int(row["global_batch_size"]),
                round=row["round"],
                submitter=row["submitter"],
            )
    return None


def _rows() -> list[dict[str, str]]:
    text = resources.files("bert_tools.doctor").joinpath(_FILE).read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
