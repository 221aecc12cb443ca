"""The command `export`, which writes a checkpoint as a directory that `transformers` loads.

The directory contains the weights, the config and the tokenizer. The command first checks the
checkpoint's digests. After an error, no directory is left. Converting the directory back gives
bit-identical weights. The checkpoint of a `pretrain` run is exported with a model card, README.md.
The card describes the model's data, its accuracy and how to load it, with the facts from the run's
`pretrain.json`.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from bert_tools.huggingface.tokenizer import tokenizer_files, vocabulary_of
from bert_tools.huggingface.weights import FAMILIES, rows_that_matter, stated_settings
from mlperf_bert.arguments import describe
from mlperf_bert.checkpoint.manifest import (
    ELSE,
    INITIALIZED_FROM,
    MODEL,
    STATE,
    read_config,
    read_manifest,
    read_state,
    resolve,
    verify_files,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ARCHITECTURES, ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import check_version, new_directory, parse, read_json, reading, write_file

CARD = "README.md"
PRETRAIN_FACTS = "pretrain.json"
FACTS_VERSION = 1
_SPARE_BYTES = 16 * 2**20  # for tokenizer files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `export` to its parser."""
    describe(
        parser,
        "Write a checkpoint as a directory that Hugging Face transformers loads, with weights, "
        "config and tokenizer. The exported weights are bit-identical to those of the checkpoint.",
        "mlperf_bert export runs/two/run_0/checkpoints --to huggingface --out exported",
    )
    text = "checkpoint to export, or directory of checkpoints, of which the newest is exported"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help=text)
    text = "directory to create"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "format of the exported directory"
    parser.add_argument("--to", choices=("huggingface",), required=True, help=text)
    text = "vocab.txt or tokenizer.json (default: from the checkpoint or a directory above it)"
    parser.add_argument("--vocab", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint, and print what was written. Returns the exit status."""
    print(export_huggingface(args.checkpoint, args.out, args.vocab))
    print(f"wrote {args.out}")
    return 0


def export_huggingface(checkpoint: Path, out: Path, vocabulary: Path | None = None) -> str:
    """Export a checkpoint to the new directory `out`, and return a line that describes it.

    Raises CheckpointError if `out` exists, and CheckpointError, ConfigError or DataError if the
    checkpoint or its vocabulary cannot be used.
    """
    # Imported here because importing torch takes seconds, and modules that use only names of this
    # one do not need it.
    import torch

    from bert_tools.huggingface.conversion import parameter_shapes
    from bert_tools.huggingface.reader import CONFIG, SINGLE
    from mlperf_bert.checkpoint.tensors import read_tensors, write_tensors

    found = resolve(checkpoint)
    manifest = read_manifest(found)
    verify_files(found, manifest, (MODEL, STATE))
    state = read_state(found)
    words = vocabulary_of(found, manifest.vocabulary_sha256, vocabulary)
    run_config = read_config(found)
    model = run_config.model
    facts = read_facts(found.absolute().parent.parent, state.step)
    tensors = read_tensors(found / MODEL)
    if {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} != {
        name: (shape, torch.float32) for name, shape in parameter_shapes(model).items()
    }:
        problem = "the tensors do not match the checkpoint's config"
        raise CheckpointError(str(found / MODEL), problem, ELSE)
    family = FAMILIES[model.architecture]
    table, bias = (tensors[name].numpy() for name in family.fills)
    num_rows = rows_that_matter(table, bias, len(words))
    for name in family.fills:
        tensors[name] = tensors[name][:num_rows]
    task = "PreTraining" if model.objective == "mlm_nsp" else "MaskedLM"
    architecture = f"{family.class_name}For{task}"
    num_bytes = sum(each.nbytes for each in tensors.values())
    metadata = {"format": "pt", "source": f"mlperf_bert {manifest.version}, step {state.step}"}
    with new_directory(out, num_bytes + _SPARE_BYTES) as folder:
        write_tensors(folder / SINGLE, tensors, metadata)
        config = config_json(model, architecture, num_rows, words.pad_id)
        files = tokenizer_files(words, model)
        if facts is not None:
            origin = manifest.origin.get(INITIALIZED_FROM, run_config.run.init_checkpoint)
            files[CARD] = model_card(run_config, architecture, state.samples, facts, origin)
        for name, contents in {CONFIG: config, **files}.items():
            write_file(folder / name, contents)
    return (
        f"{architecture} of step {state.step:,}: {len(tensors)} tensors, {num_bytes // 4:,} "
        f"weights, a word embedding of {num_rows:,} rows"
    )


def config_json(model: ModelSection, architecture: str, num_rows: int, pad_token_id: int) -> bytes:
    """Return the contents of config.json for a model.

    `num_rows` is the number of rows of the exported word embedding.
    """
    values = {
        "architectures": [architecture],
        **stated_settings(model),
        "vocab_size": num_rows,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode("ascii")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about a model that `pretrain` records for the model card.

    A fact is None if it was not recorded. Accuracies are fractions (0 .. 1) of the held-out set's
    masked tokens. `accuracy` is that of the final weights, and `untrained` that of the initial
    weights. `characters` is the length of the whole text. `left_out` is the number of its
    characters that cleaning removed. Held-out documents that the held-out set has no room for are
    not among them.
    """

    accuracy: float
    steps: int
    untrained: float | None
    context_free_accuracy: float | None = None
    documents: int | None = None
    held_out_documents: int | None = None
    characters: int | None = None
    left_out: int | None = None
    example: str | None = None

    def accuracy_in_words(self) -> str:
        """Return a phrase with the accuracy, the baseline's accuracy and that before training."""
        others = []
        if self.context_free_accuracy is not None:
            others.append(f"{self.context_free_accuracy:.4f} of a context-free baseline")
        if self.untrained is not None:
            others.append(f"{self.untrained:.4f} before training")
        compared = f" (compared with {', and '.join(others)})" if others else ""
        return f"held-out accuracy {self.accuracy:.4f}{compared}"

    def data_in_words(self) -> str:
        """Return sentences for the model card that describe the training text."""
        if self.documents is None:
            return "The run did not record which text the model was trained on."
        words = f"The model was trained on {self.documents:,} documents."
        if self.held_out_documents is not None:
            held_out = f"{self.held_out_documents:,} other documents"
            words += f" The accuracy was measured on {held_out}, which were held out."
        if self.characters and self.left_out is not None:
            share = self.left_out / self.characters
            words += f" The text had {self.characters:,} characters, of which {share:.1%} were"
            words += " left out."
        return words


def read_facts(run_dir: Path, step: int) -> Facts | None:
    """Read the facts about a run from the file in its directory.

    Returns None if there is no file, or if the file describes a step other than `step`. Raises
    DataError if the file is damaged.
    """
    path = run_dir / PRETRAIN_FACTS
    if not path.exists():
        return None
    remedy = "delete this file to export without a model card"
    values = read_json(path, missing="no such file", remedy=remedy)
    with reading(path, remedy):
        check_version(values, FACTS_VERSION, key="schema_version")
        facts = parse(Facts, values)
    return facts if facts.steps == step else None


def model_card(
    config: RunConfig, architecture: str, samples: int, facts: Facts, first: str
) -> bytes:
    """Return the contents of README.md, the model card.

    `first` is the name of the checkpoint that training started from, or empty.
    """
    model, data, optim = config.model, config.data, config.optim
    masks = "drawn anew each time" if data.masking == "dynamic" else "stored with the data"
    example = f"\nA held-out sentence with one mask: {facts.example}\n" if facts.example else ""
    initial = ""
    if first:
        initial = f"- Training started from the weights of {first}, whose license applies too.\n"
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---

# A {ARCHITECTURES[model.architecture]} encoder

License: fill this in before you share the model. The license of the training text may limit your
choice.

## Data

{facts.data_in_words()}

## Model and training

- {architecture} with {model.num_layers} layers of size {model.hidden_size}, {model.num_heads} heads
  and a vocabulary of {model.vocab_size:,} tokens. It has {model.num_parameters:,} weights, and was
  trained by mlperf_bert.
{initial}- The model reads at most {model.max_position_embeddings} tokens. The tokenizer truncates a
  longer text only if you ask for it, as below.
- It was trained for {facts.steps:,} steps of {config.parallel.global_batch_size} sequences of up to
  {data.max_seq_length} tokens, which is {samples:,} sequences in all.
- {data.masking_rate:.0%} of the tokens were masked, with masks {masks}.
- The optimizer was {optim.name} with a peak learning rate of {optim.learning_rate:g}.

## Accuracy

The share of masked tokens in held-out text that the model predicts correctly:
{facts.accuracy_in_words()}.
{example}
## How to load it

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained("DIR")  # this directory
model = AutoModelForMaskedLM.from_pretrained("DIR")
truncate = {{"truncation": True}}  # shorten a text that is too long
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, tokenizer_kwargs=truncate)
print(fill(f"The {{tokenizer.mask_token}} is here."))
```
""".encode()
