"""The sub-command `export`: writes a checkpoint as a directory that `transformers` loads.

It has weights, config and tokenizer. Digests are checked first, and the directory is complete or
absent. Importing it again gives the same weights, bit for bit. After `pretrain` it also has a model
card, README.md, of the facts in the run's `pretrain.json`: the model's data, its accuracy, how to
load it.
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
_SPARE_BYTES = 16 * 2**20  # of tokenizer files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    describe(
        parser,
        "Write a checkpoint as a directory that Hugging Face transformers loads, with weights, "
        "config and tokenizer. The weights stay the same bit for bit.",
        "mlperf_bert export runs/two/run_0/checkpoints --to huggingface --out exported",
    )
    text = "a checkpoint, or a directory of checkpoints, whose newest is used"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help=text)
    text = "directory to create"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "program that should load it"
    parser.add_argument("--to", choices=("huggingface",), required=True, help=text)
    text = "vocab.txt or tokenizer.json of the model (default: in the checkpoint or above it)"
    parser.add_argument("--vocab", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Export, and print what was written."""
    print(export_huggingface(args.checkpoint, args.out, args.vocab))
    print(f"written: {args.out}")
    return 0


def export_huggingface(checkpoint: Path, out: Path, vocabulary: Path | None = None) -> str:
    """Write `out`, which must not exist, and say in a line what it holds.

    Raises CheckpointError, ConfigError or DataError.
    """
    import torch  # which takes seconds, and readers of this file's names do without it

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
    facts = read_facts(found.absolute().parents[1], state.step)
    tensors = read_tensors(found / MODEL)
    if {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} != {
        name: (shape, torch.float32) for name, shape in parameter_shapes(model).items()
    }:
        raise CheckpointError(str(found / MODEL), "does not hold the model of its config", ELSE)
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
        f"weights, {num_rows:,} rows of words"
    )


def config_json(model: ModelSection, architecture: str, num_rows: int, pad_token_id: int) -> bytes:
    """The contents of config.json for a word embedding of `num_rows`."""
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
    """Facts that `pretrain` knows and the weights do not hold; None if not recorded.

    Accuracies, 0 .. 1, are over masked tokens of the held-out set: of the last weights, of the
    initial weights, and of the context-free baseline. `characters` counts the whole text,
    `left_out` the part of it that is in no set.
    """

    accuracy: float
    steps: int
    untrained: float
    context_free_accuracy: float | None = None
    documents: int | None = None
    held_out_documents: int | None = None
    characters: int | None = None
    left_out: int | None = None
    example: str | None = None

    def accuracy_in_words(self) -> str:
        """The accuracy and the accuracies to compare it with."""
        words = f"held-out accuracy {self.accuracy:.4f}"
        if self.context_free_accuracy is not None:
            words += f"; the context-free baseline {self.context_free_accuracy:.4f}"
        return words + f"; the weights before training {self.untrained:.4f}"

    def data_in_words(self) -> str:
        """The training text in words."""
        if self.documents is None:
            return "Which text it was trained on was not noted with the run."
        words = f"{self.documents:,} documents were trained on"
        if self.held_out_documents is not None:
            words += f", {self.held_out_documents:,} others were held out to measure the accuracy"
        if self.characters and self.left_out is not None:
            share = self.left_out / self.characters
            words += f". The text had {self.characters:,} characters; {share:.1%} were left out"
        return words + "."


def read_facts(run_dir: Path, step: int) -> Facts | None:
    """Facts from a run's directory; None if it has none of that step. Raises DataError."""
    path = run_dir / PRETRAIN_FACTS
    if not path.exists():
        return None
    remedy = "delete it, and export without its facts"
    values = read_json(path, missing="is missing", remedy=remedy)
    with reading(path, remedy):
        check_version(values, FACTS_VERSION, key="schema_version")
        facts = parse(Facts, values)
    return facts if facts.steps == step else None


def model_card(
    config: RunConfig, architecture: str, samples: int, facts: Facts, first: str
) -> bytes:
    """The contents of README.md; `first` names the weights that training began with, if any."""
    model, data, optim = config.model, config.data, config.optim
    masks = "drawn anew each time" if data.masking == "dynamic" else "stored with the data"
    example = f"\nA held-out sentence, one word masked: {facts.example}\n" if facts.example else ""
    begun = f"- It began with the weights of {first}, whose license applies too.\n" if first else ""
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---

# A {ARCHITECTURES[model.architecture]} encoder

License: fill it in before you share this model; the text it was trained on has a say.

## Data

{facts.data_in_words()}

## Model and training

- {architecture}: {model.num_layers} layers of {model.hidden_size}, {model.num_heads} heads, a
  vocabulary of {model.vocab_size:,}, {model.num_parameters:,} weights; trained by mlperf_bert.
{begun}- It reads {model.max_position_embeddings} tokens; a longer text is truncated if the
  tokenizer is asked to.
- {facts.steps:,} steps of {config.parallel.global_batch_size} sequences of up to
  {data.max_seq_length} tokens, {samples:,} sequences in all.
- {data.masking_rate:.0%} of the tokens masked, the masks {masks}.
- {optim.name} with a learning rate of {optim.learning_rate:g} at its highest.

## Accuracy

Masked tokens of held-out text that are predicted right: {facts.accuracy_in_words()}.
{example}
## How to load it

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained("DIR")  # this directory
model = AutoModelForMaskedLM.from_pretrained("DIR")
cut = {{"truncation": True}}  # a text that is too long
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, tokenizer_kwargs=cut)
print(fill(f"The {{tokenizer.mask_token}} is here."))
```
""".encode()
