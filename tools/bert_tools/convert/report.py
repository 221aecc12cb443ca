"""What became of a source's tensors, for people and as JSON."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Of one conversion.

    Args:
        form: what the source is.
        out: the checkpoint.
        matched: tensors that were taken over.
        parameters: numbers in them, padding not counted.
        dtypes: how many tensors the source holds in each.
        copies: tensors that repeat another, and are equal to it.
        ignored: tensor of the source -> why it was passed over.
        drawn: parameters that the source has not, drawn at random -> head they are part of.
        model: the section [model] of the checkpoint's config.
        vocabulary: file's name, tokens, digest.
        rows_in_source, rows: of the word embedding, there and here.
        remarks: what else a user should know.
    """

    form: str
    out: str
    matched: int
    parameters: int
    dtypes: Mapping[str, int]
    copies: tuple[str, ...]
    ignored: Mapping[str, str]
    drawn: Mapping[str, str]
    model: Mapping[str, Any]
    vocabulary: Mapping[str, str | int]
    rows_in_source: int
    rows: int
    remarks: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        names = [name for name in self.__slots__ if name not in ("ignored", "drawn")]
        values = {name: getattr(self, name) for name in names}
        lists = {"ignored": dict(self.ignored), "drawn": dict(self.drawn)}
        return {"schema_version": SCHEMA_VERSION, **values, **lists}

    def lines(self) -> list[str]:
        """For people."""
        model, vocabulary = self.model, self.vocabulary
        dtypes = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(self.dtypes.items()))
        lines = [
            f"{self.form}: {self.matched} tensors matched, {self.parameters:,} weights ({dtypes})",
            f"model: {model['num_layers']} layers, hidden {model['hidden_size']}, "
            f"{model['num_heads']} heads, feed-forward {model['intermediate_size']}, "
            f"{model['max_position_embeddings']} positions, objective {model['objective']}",
            f"vocabulary: {vocabulary['tokens']:,} tokens, sha256 {vocabulary['sha256']}",
            self._rows_in_words(),
        ]
        if self.copies:
            lines.append(f"equal to their originals, as they must be: {', '.join(self.copies)}")
        for why, count in Counter(self.ignored.values()).items():
            first = next(name for name, reason in self.ignored.items() if reason == why)
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"ignored, {why}: {first}{others}")
        for head, count in Counter(self.drawn.values()).items():
            lines.append(f"NOT in the source, drawn at random: the {head} ({count} tensors)")
        return [*lines, *(f"note: {remark}" for remark in self.remarks), f"written: {self.out}"]

    def _rows_in_words(self) -> str:
        text = f"word embedding: {self.rows_in_source:,} rows"
        if self.rows > self.rows_in_source:
            added = self.rows - self.rows_in_source
            return f"{text}, and {added} that pad and never matter (decision 0019)"
        if self.rows < self.rows_in_source:
            return f"{text}, the last {self.rows_in_source - self.rows} dropped: no token has them"
        return f"{text}, all kept"
