"""The model card of an export, README.md: the model's data, its accuracy, how to load it.

The facts come from `own_text.json` in a run directory, written by `own-text`.
"""

from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ARCHITECTURES
from mlperf_bert.files import check_version, parse, read_json, reading

CARD = "README.md"
OWN_TEXT = "own_text.json"
FACTS_VERSION = 1
_REMEDY = "delete it, and export without its facts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that the weights do not hold; None if not recorded.

    Accuracies, 0 .. 1, are over masked tokens of the held-out set: of the last weights, of the
    initial weights, and of the best guess without context. `characters` counts the whole text,
    `left_out` the part of it that is in no set.
    """

    accuracy: float
    steps: int
    untrained: float | None = None
    guess: float | None = None
    documents: int | None = None
    held_out_documents: int | None = None
    characters: int | None = None
    left_out: int | None = None
    example: str | None = None

    def accuracy_in_words(self) -> str:
        """The accuracy and the accuracies to compare it with."""
        words = f"held-out accuracy {self.accuracy:.4f}"
        if self.guess is not None:
            words += f"; the best guess without context {self.guess:.4f}"
        if self.untrained is not None:
            words += f"; the weights before training {self.untrained:.4f}"
        return words

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


def read_facts(run_dir: Path, state: CheckpointState) -> Facts | None:
    """Facts from a run's directory, else from the checkpoint; None if neither has any.

    Raises DataError for a damaged file.
    """
    path = run_dir / OWN_TEXT
    if path.exists():
        values = read_json(path, missing="is missing", remedy=_REMEDY)
        with reading(path, _REMEDY):
            check_version(values, FACTS_VERSION, key="schema_version")
            facts = parse(Facts, values)
        if facts.steps == state.step:
            return facts
    if state.step and state.mlm_accuracy is not None:
        return Facts(accuracy=state.mlm_accuracy, steps=state.step)
    return None


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
