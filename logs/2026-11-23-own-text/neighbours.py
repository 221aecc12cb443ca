"""How often a held-out sentence's nearest neighbour is of its own document, with intervals.

    python neighbours.py measure TEXT EXPORTED [EXPORTED ...]
    python neighbours.py table

TEXT is the held-out text of prepared data (text/eval.txt): one sentence a line, an empty line
between documents. Each EXPORTED is the model of one seed that `pretrain` wrote. `measure` writes
neighbours.npz beside this file: for each sentence its document, the vectors of each model (the mean
of the last layer over the tokens, float16), and for the other ways whether the neighbour is of the
same document. `table` reads only this file.

Nearest is by cosine, the sentence itself left out. Equal sentences count once, and documents of one
sentence are left out.
"""

import sys
from pathlib import Path

import numpy as np
from scipy.stats import t

RECORD = Path(__file__).with_name("neighbours.npz")
UNTRAINED_SEEDS = range(5)
LEAST_WORDS = 4  # of a sentence: shorter ones are headings and remains of code
BATCH = 64


def read_documents(path):
    """Sentences by document."""
    seen, documents = set(), [[]]
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            documents.append([])
        elif line not in seen and len(line.split()) >= LEAST_WORDS:
            seen.add(line)
            documents[-1].append(line)
    return [document for document in documents if len(document) > 1]


def hits(vectors, document):
    """For each row [N, D]: is the nearest other row by cosine of the same document [N]?"""
    vectors = vectors.astype(np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, 1)
    similar = unit @ unit.T
    np.fill_diagonal(similar, -2)
    return document[similar.argmax(axis=1)] == document


def embed(model, tokenizer, sentences):
    """The mean of the last layer over each sentence's tokens, float16 [N, D]."""
    import torch

    order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
    found = np.zeros((len(sentences), model.config.hidden_size), np.float16)
    model.eval()
    for first in range(0, len(order), BATCH):
        rows = order[first : first + BATCH]
        texts = [sentences[row] for row in rows]
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        found[rows] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return found


def measure(text, exported):
    """Write the record."""
    import torch
    from sklearn.feature_extraction.text import TfidfVectorizer
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    documents = read_documents(text)
    sentences = [sentence for document in documents for sentence in document]
    document = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
    found = {"document": document.astype(np.int16)}
    for number, path in enumerate(exported, 1):
        tokenizer = AutoTokenizer.from_pretrained(path)
        found[f"trained_{number}"] = embed(AutoModel.from_pretrained(path), tokenizer, sentences)
    for seed in UNTRAINED_SEEDS:
        torch.manual_seed(seed)
        model = AutoModel.from_config(AutoConfig.from_pretrained(exported[0]))
        found[f"untrained_{seed}"] = hits(embed(model, tokenizer, sentences), document)
    words = TfidfVectorizer(dtype=np.float32).fit_transform(sentences).toarray()
    found["words"] = hits(words, document)
    np.savez_compressed(RECORD, **found)


def interval(rows, document):
    """Share of hits and its 95 % interval, if other documents could have been held out.

    `rows` has a number for each sentence: a hit, a mean over seeds or a difference of two ways.
    Documents are left out one by one (jackknife), and Student's t has their number less one.
    """
    counts, sums = np.bincount(document), np.bincount(document, rows)
    share = sums.sum() / counts.sum()
    without = (sums.sum() - sums) / (counts.sum() - counts)
    number = len(counts)
    error = np.sqrt((number - 1) / number * ((without - without.mean()) ** 2).sum())
    half = t.ppf(0.975, number - 1) * error
    return share, share - half, share + half


def table():
    """Print the shares."""
    record = np.load(RECORD)
    document = record["document"].astype(np.int64)
    trained = [hits(record[name], document) for name in record.files if name.startswith("trained")]
    untrained = [record[name] for name in record.files if name.startswith("untrained")]
    ways = {
        f"the trained model, {len(trained)} seeds": trained,
        f"the same model untrained, {len(untrained)} seeds": untrained,
        "bag of words (tf-idf)": [record["words"]],
    }
    print(f"{len(document):,} sentences of {document.max() + 1} held-out documents:\n")
    print("| nearest neighbour by | of the same document (95 %, by document) | each seed |")
    print("|---|---|---|")
    means = {name: np.mean(rows, axis=0) for name, rows in ways.items()}
    for name, rows in ways.items():
        seeds = ", ".join(f"{each.mean():.3f}" for each in rows) if len(rows) > 1 else ""
        print(f"| {name} | {in_words(interval(means[name], document))} | {seeds} |")
    first, before, words = means.values()
    for name, other in (("untrained model", before), ("bag of words", words)):
        print(f"| trained model minus {name} | {in_words(interval(first - other, document))} | |")
    counts = np.bincount(document)
    pairs = (counts * (counts - 1)).sum() / (len(document) * (len(document) - 1))
    print(f"| chance | {pairs:.3f} | |")


def in_words(found):
    """Share and interval."""
    share, low, high = found
    return f"{share:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        table()
    elif len(sys.argv) > 3 and sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
    else:
        sys.exit(__doc__)
