"""The report of a conversion: the fate of every tensor, for programs and for people."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from bert_tools.huggingface.conversion import HEAD, STARTING, Conversion
from mlperf_bert.checkpoint.manifest import MODEL, read_manifest
from mlperf_bert.config.files import config_to_tables
from mlperf_bert.errors import typed
from mlperf_bert.vocabulary.any_vocabulary import file_name


def report_of(conversion: Conversion, out: Path) -> dict[str, Any]:
    """The JSON object of `convert`: the fate of every tensor, also read back from `out`.

    `parameters` counts numbers taken over, without padding; `dtypes` counts the source's tensors
    by dtype; `ignored` gives the reason, `drawn` the head; `rows` are the word embedding's here.
    """
    source, vocabulary = conversion.source, conversion.vocabulary
    taken = {name: source.weights[name] for name in conversion.shapes if name in source.weights}
    return {
        "schema_version": 1,
        "form": source.form,
        "out": str(out),
        "weights_sha256": read_manifest(out).files[MODEL].sha256,
        "matched": len(taken),
        "parameters": sum(math.prod(weight.shape) for weight in taken.values()),
        "dtypes": dict(Counter(weight.tensor.dtype for weight in taken.values())),
        "model": config_to_tables(conversion.config)["model"],
        "vocabulary": {
            "file": file_name(vocabulary),
            "tokens": len(vocabulary),
            "sha256": vocabulary.sha256,
        },
        "rows_in_source": conversion.word_rows,
        "rows": conversion.shapes[source.family.words][0],
        "remarks": list(conversion.remarks),
        "config": str(out / STARTING),
        "ignored": {**source.ignored, **conversion.unused},
        "drawn": dict.fromkeys(conversion.drawn, HEAD),
    }


def in_words(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    model, vocabulary, rows = report["model"], report["vocabulary"], report["rows"]
    dtypes = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(report["dtypes"].items()))
    added = rows - report["rows_in_source"]
    kept = "all kept"
    if added > 0:
        kept = f"and {added} that pad and never matter (decision 0019)"
    elif added < 0:
        kept = f"the last {-added} dropped: no token has them"
    lines = [
        f"{report['form']}: {report['matched']} tensors matched, {report['parameters']:,} weights "
        f"({dtypes})",
        f"model: {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['num_heads']} heads, feed-forward {model['intermediate_size']}, "
        f"{model['max_position_embeddings']} positions, objective {model['objective']}",
        f"vocabulary: {vocabulary['tokens']:,} tokens, sha256 {vocabulary['sha256']}",
        f"word embedding: {report['rows_in_source']:,} rows, {kept}",
    ]
    for why, count in Counter(report["ignored"].values()).items():
        first = next(name for name, reason in report["ignored"].items() if reason == why)
        others = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"ignored, {why}: {first}{others}")
    for head, count in Counter(report["drawn"].values()).items():
        lines.append(f"NOT in the source, drawn at random: the {head} ({count} tensors)")
    lines += [f"note: {remark}" for remark in report["remarks"]]
    lines.append(f"written: {report['out']}, weights of sha256 {report['weights_sha256']}")
    for words in (
        ("own-text", "TEXT", "--out", "NEW"),
        ("train", "--data", "DATA", "--config", report["config"]),
    ):
        lines.append(f"to go on from it: {typed(*words, '--init-checkpoint', report['out'])}")
    return lines
