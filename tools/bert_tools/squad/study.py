"""The published study that `squad compare` stands beside, and what its own figures say of it."""

import csv
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

SHIPPED = "study.csv"
TITLE = "BERT-base on SQuAD v2, 4 NVIDIA A100 40 GB, as published"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRow:
    """One experiment as published; what follows from its figures are properties."""

    experiment: str
    devices: int
    global_batch: int
    precision: str
    runtime_s: float
    samples_per_s: float
    validation_loss: float
    utilisation_percent: float
    efficiency: float
    goodput: float
    updates: int

    @property
    def samples(self) -> float:
        """That it trained on: rate times runtime."""
        return self.samples_per_s * self.runtime_s

    @property
    def samples_per_update(self) -> float:
        """What its updates were made of; the global batch, if the figures agree."""
        return self.samples / self.updates

    @property
    def product(self) -> float:
        """Rate times efficiency: the definition of goodput."""
        return self.samples_per_s * self.efficiency

    @property
    def least_efficiency(self) -> float:
        """That (phi + M0) / (phi + M) can be for any initial batch M0 >= 1: at phi = 0, M0 = 1."""
        return 1 / self.global_batch

    def least_of_product(self, initial_batch: int) -> float:
        """That it can be if M was taken times M0 where the algebra wants it divided by M0.

        With the scale s = M * M0 in the place of M / M0 the efficiency is (phi + 1) / (phi + s),
        phi in initial batches: at least 1 / s.
        """
        return 1 / (self.global_batch * initial_batch)

    def as_json(self) -> dict[str, Any]:
        """Published figures, and those that follow."""
        return asdict(self) | {
            "samples": self.samples,
            "samples_per_update": self.samples_per_update,
            "samples_per_s_times_efficiency": self.product,
            "least_efficiency_by_definition": self.least_efficiency,
        }


def published_study() -> list[StudyRow]:
    """The rows of the shipped table; the first is the baseline."""
    text = resources.files(__package__).joinpath(SHIPPED).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_row(cells) for cells in csv.DictReader(lines)]


def _row(cells: dict[str, str]) -> StudyRow:
    return StudyRow(
        experiment=cells["experiment"],
        devices=int(cells["devices"]),
        global_batch=int(cells["global_batch"]),
        precision=cells["precision"],
        runtime_s=float(cells["runtime_s"]),
        samples_per_s=float(cells["samples_per_s"]),
        validation_loss=float(cells["validation_loss"]),
        utilisation_percent=float(cells["utilisation_percent"]),
        efficiency=float(cells["efficiency"]),
        goodput=float(cells["goodput"]),
        updates=int(cells["updates"]),
    )
