"""How often a held-out sentence's nearest neighbour is of its own document.

`python neighbours.py EXPORTED DATA` prints a table, then the same as one line of JSON. EXPORTED is
what `export` or `own-text` wrote; DATA is prepared data, whose cleaned held-out text is read
(text/eval.txt), or such a text: one sentence a line, an empty line between documents.

Nearest is by cosine, the sentence itself left out. Rows: the exported model, its last layer's mean
over the tokens; the same model with random weights, of several seeds; tf-idf of words; chance.
Equal sentences are taken once, and documents of one sentence are left out. Nothing is random but
the seeds, so the same files give the same table.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import AutoConfig, AutoModel, AutoTokenizer

SEEDS = range(5)
LEAST_WORDS = 4  # of a sentence: shorter ones are headings and remains of code
BATCH, ROWS = 64, 1024  # sentences of a forward; of a block of similarities


def read_documents(place: Path) -> list[list[str]]:
    """Sentences by document. Ends the program where there are too few."""
    path = place / "text" / "eval.txt" if place.is_dir() else place
    seen: set[str] = set()
    documents: list[list[str]] = [[]]
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            documents.append([])
        elif line not in seen and len(line.split()) >= LEAST_WORDS:
            seen.add(line)
            documents[-1].append(line)
    documents = [document for document in documents if len(document) > 1]
    if len(documents) < 2:
        sys.exit(f"{path}: has {len(documents)} documents of two sentences; give more text")
    return documents


def share_of_own(vectors: NDArray[np.float32], document: NDArray[np.int64]) -> float:
    """Share of rows [N, D] whose nearest other row by cosine is of the same document [N]."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, 1)
    hits = 0
    for first in range(0, len(unit), ROWS):
        similar = unit[first : first + ROWS] @ unit.T
        rows = np.arange(len(similar))
        similar[rows, first + rows] = -2
        hits += int((document[similar.argmax(axis=1)] == document[first + rows]).sum())
    return hits / len(unit)


def chance(document: NDArray[np.int64]) -> float:
    """The expected share where the neighbour is any other sentence."""
    counts, total = np.bincount(document), len(document)
    return float((counts * (counts - 1)).sum() / (total * (total - 1)))


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, sentences: list[str]) -> NDArray[np.float32]:
    """The mean of the last layer over each sentence's tokens, [N, D]."""
    order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
    found = np.zeros((len(sentences), model.config.hidden_size), np.float32)
    model.eval()
    for first in range(0, len(order), BATCH):
        rows = order[first : first + BATCH]
        texts = [sentences[row] for row in rows]
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        found[rows] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return found


def measure(exported: Path, place: Path) -> dict[str, Any]:
    """All rows of the table."""
    documents = read_documents(place)
    sentences = [sentence for document in documents for sentence in document]
    document = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
    tokenizer = AutoTokenizer.from_pretrained(exported)

    def of(model: Any) -> float:
        return share_of_own(embed(model, tokenizer, sentences), document)

    untrained = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        untrained.append(of(AutoModel.from_config(AutoConfig.from_pretrained(exported))))
    words = TfidfVectorizer(dtype=np.float32).fit_transform(sentences).toarray()
    return {
        "documents": len(documents),
        "sentences": len(sentences),
        "trained": of(AutoModel.from_pretrained(exported)),
        "untrained": untrained,
        "bag_of_words": share_of_own(words, document),
        "chance": chance(document),
    }


def in_words(found: dict[str, Any]) -> str:
    """The table."""
    untrained = found["untrained"]
    spread = f"{min(untrained):.3f} to {max(untrained):.3f}, {len(untrained)} seeds"
    return "\n".join(
        (
            f"{found['sentences']:,} sentences of {found['documents']:,} held-out documents",
            "",
            "| nearest neighbour by | of the same document |",
            "|---|---|",
            f"| the trained model | {found['trained']:.3f} |",
            f"| the same model untrained | {np.mean(untrained):.3f} ({spread}) |",
            f"| bag of words (tf-idf) | {found['bag_of_words']:.3f} |",
            f"| chance | {found['chance']:.3f} |",
        )
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    result = measure(Path(sys.argv[1]), Path(sys.argv[2]))
    print(in_words(result))
    print(json.dumps(result))
