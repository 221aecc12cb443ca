"""Seconds and memory of `convert` and `export` for a BERT-large of random weights, as JSON.

`python measure_convert.py DIR` needs 4.1 GB in DIR while it runs and leaves nothing there.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from mlperf_bert.checkpoint.huggingface.export import config_json
from mlperf_bert.checkpoint.huggingface.reader import read_safetensors
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

LARGE = ModelSection()
WITH_WORDS = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")


def write_source(folder: Path) -> None:
    """As `transformers` saves it: a row a word, no padding."""
    folder.mkdir()
    tensors = BertForPretraining(LARGE, torch.device("cpu"), seed=1).state_dict()
    for name in WITH_WORDS:
        tensors[name] = tensors[name][: LARGE.vocab_size]
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    config = config_json(LARGE, "BertForPreTraining", LARGE.vocab_size, 0)
    (folder / "config.json").write_bytes(config)
    words = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(LARGE.vocab_size - 5))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def measure(*arguments: object) -> dict[str, float | str]:
    """Run a sub-command in a process of its own; its peak covers Python and torch too."""
    words = [str(argument) for argument in arguments]
    start = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "mlperf_bert", *words], stdout=sys.stderr)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{words[0]} ended with status {status}")
    seconds = time.monotonic() - start
    peak_mb = usage.ru_maxrss * 1024 / 1e6
    return {"command": words[0], "seconds": round(seconds, 1), "peak_mb": round(peak_mb)}


def main(directory: str) -> None:
    """Print one JSON object a command, and whether the weights came back bit for bit."""
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        source, ours, again = (Path(temporary) / name for name in ("theirs", "ours", "again"))
        # In a process of its own, as this one's memory would count as that of its children.
        subprocess.run([sys.executable, __file__, "--write", source], check=True)
        print(json.dumps(measure("convert", source, "--from", "huggingface", "--out", ours)))
        print(json.dumps(measure("export", ours, "--to", "huggingface", "--out", again)))
        before, after = (read_safetensors(each / "model.safetensors") for each in (source, again))
        same = all((before[name].read() == after[name].read()).all() for name in before)
        size_mb = round((source / "model.safetensors").stat().st_size / 1e6)
        print(json.dumps({"source_mb": size_mb, "same": bool(same and len(before) == len(after))}))


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write_source(Path(sys.argv[2]))
    else:
        main(sys.argv[1])
