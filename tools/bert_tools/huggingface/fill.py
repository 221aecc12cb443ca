"""The command `fill`, which prints a model's most probable words for each [MASK] of a text.

Shape letters: T tokens of the text, P masked positions, V vocabulary (padded).
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from mlperf_bert.data.batch import UnpaddedBatch
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.model.bert import BertForPretraining
    from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

MOST = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `fill` to its parser."""
    describe(
        parser,
        "Print the words that a checkpoint predicts for each [MASK] of a text, with their "
        "probabilities, one per line.",
        'mlperf_bert fill "The [MASK] sat." --checkpoint runs/two/run_0/checkpoints',
    )
    parser.add_argument("text", metavar="TEXT", help="text with [MASK] for each word to predict")
    text = "checkpoint to load, or directory of checkpoints, of which the newest is loaded"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=text)
    text = "vocab.txt or tokenizer.json (default: from the checkpoint or a directory above it)"
    parser.add_argument("--vocab", type=Path, metavar="FILE", help=text)
    text = "number of words to print for each [MASK]"
    parser.add_argument("--top", type=int, default=5, metavar="N", help=text)
    text = "device to run the model on"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the most probable words for each [MASK], one per line. Returns the exit status.

    Raises ConfigError, CheckpointError or DataError if the text, the checkpoint or its vocabulary
    cannot be used.
    """
    from bert_tools.huggingface.tokenizer import vocabulary_of
    from mlperf_bert.checkpoint.load import load_weights
    from mlperf_bert.checkpoint.manifest import read_config, read_manifest, resolve
    from mlperf_bert.distributed.session import in_session
    from mlperf_bert.model.bert import make_model
    from mlperf_bert.step.eager import weights_dtype

    if not 1 <= args.top <= MOST:
        problem = f"must be from 1 to {MOST}, not {args.top}"
        raise ConfigError("--top", problem, "choose another number")
    checkpoint = resolve(args.checkpoint)
    config = read_config(checkpoint)
    sha256 = read_manifest(checkpoint).vocabulary_sha256
    vocabulary = vocabulary_of(checkpoint, sha256, args.vocab)
    # The attention implementation does not change results, and that of training may not run here.
    config = replace(config, model=replace(config.model, attention="auto"))

    def run_rank(_info: "RankInfo", device: "torch.device") -> int:
        model = make_model(config, 0, device)
        load_weights(model, checkpoint, vocabulary.sha256)
        model.to(weights_dtype(config.model.precision)).eval()
        filled = fill(model, vocabulary, args.text, args.top)
        for number, candidates in enumerate(filled):
            if len(filled) > 1:
                print(f"[MASK] {number + 1}")
            for candidate in candidates:
                print(f"{candidate.probability:.4f}  {candidate.token}")
        return 0

    return in_session(run_rank, args.device, config.parallel.share_gpu)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may replace a [MASK], and its probability, 0 .. 1."""

    token: str
    probability: float


def fill(
    model: "BertForPretraining", vocabulary: "AnyVocabulary", text: str, top: int
) -> list[list[Candidate]]:
    """Return the `top` most probable tokens for each [MASK] of a text, in descending order.

    The model must be in evaluation mode. If the text has several masks, each word is predicted
    independently of the others. Special tokens are never candidates.

    Raises:
        ConfigError: the text has no [MASK], or is too long for the model.
    """
    import torch

    from bert_tools.huggingface.tokenizer import tokens_of

    batch = _batch(tokens_of(text, vocabulary, model.config.max_position_embeddings), vocabulary)
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model(batch.to(device)).mlm  # [P, V]
        probabilities = logits.float().softmax(dim=-1)[:, : len(vocabulary)]
        special = {
            getattr(vocabulary, f"{role}_id") for role in ("pad", "unk", "cls", "sep", "mask")
        }
        probabilities[:, sorted(special)] = 0
        best = probabilities.topk(min(top, len(vocabulary) - len(special)), dim=-1)
    return [
        [Candidate(_spelled(token, vocabulary), value) for token, value in zip(*pair, strict=True)]
        for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _spelled(token: int, vocabulary: "AnyVocabulary") -> str:
    """Return the text that a token id stands for."""
    from mlperf_bert.vocabulary.word_pieces import Vocabulary

    if isinstance(vocabulary, Vocabulary):
        return vocabulary.tokens[token]
    # A space or a byte that is not a whole character has no text, so its name is shown.
    tokenizer = vocabulary.tokenizer
    return str(tokenizer.decode([token])).strip() or str(tokenizer.id_to_token(token))


def _batch(tokens: list[int], vocabulary: "AnyVocabulary") -> "UnpaddedBatch":
    """Return a batch of one sequence, in which the mask tokens are the masked positions."""
    import torch

    from mlperf_bert.data.batch import IGNORED, empty_batch

    input_ids = torch.tensor(tokens)
    masked = (input_ids == vocabulary.mask_id).nonzero().flatten()
    batch = empty_batch((len(tokens),), (len(masked),))
    batch.input_ids.copy_(input_ids)
    torch.arange(len(tokens), out=batch.position_ids)
    batch.token_type_ids.zero_()
    batch.cu_seqlens.copy_(torch.tensor([0, len(tokens)]))
    batch.sample_ids.zero_()
    batch.masked_token_index.copy_(masked)
    batch.labels.fill_(IGNORED)
    batch.next_sentence_label.zero_()
    batch.mlm_denominator.fill_(1)
    batch.nsp_denominator.fill_(1)
    return batch
