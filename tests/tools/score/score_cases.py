"""A tiny random BERT with its tokenizer, and made-up opinions."""

import json
import random

import torch

GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")
OTHERS = ("the", "a", "film", "was", "song", "book", "very")
WORDS = (*GOOD, *BAD, *OTHERS)


def save_model(directory, seed, **sizes):
    """Write a random model of transformers that reads WORDS."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    directory.mkdir()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (directory / "vocab.txt").write_text("\n".join(tokens))
    BertTokenizerFast(vocab=str(directory / "vocab.txt")).save_pretrained(directory)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        **sizes,
    }
    torch.manual_seed(seed)
    BertModel(BertConfig(vocab_size=len(tokens), **sizes)).save_pretrained(directory)
    return directory


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def opinions(count, seed=0):
    """Texts of five words, of which one tells the label."""
    rng = random.Random(seed)
    for number in range(count):
        words = [rng.choice((BAD, GOOD)[number % 2]), *rng.choices(OTHERS, k=4)]
        rng.shuffle(words)
        yield {"text": " ".join(words), "label": ("bad", "good")[number % 2]}
