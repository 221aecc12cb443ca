"""The masking rule in plain Python: the readable reference of `data/compiled_masking.py`."""

from mlperf_bert.model.dropout_keys import philox


def plain_masks(
    tokens,
    *,
    sample,
    count,
    special,
    mask_id,
    vocab_size,
    number,
    seed,
):
    """One sequence masked: its tokens then, the masked positions ascending, what was there."""
    masked = list(tokens)
    candidates = [place for place, token in enumerate(tokens) if token not in special]
    words = [token for token in range(vocab_size) if token not in special]
    for draw in range(count):
        where, how, what = random_words(draw, sample, number, seed)
        # Of the candidates not yet taken, the one at that share of their number.
        place = draw + (where * (len(candidates) - draw) >> 32)
        candidates[draw], candidates[place] = candidates[place], candidates[draw]
        position = candidates[draw]
        if 10 * how < 8 * 2**32:
            masked[position] = mask_id
        elif 10 * how >= 9 * 2**32:
            masked[position] = words[what * len(words) >> 32]
    positions = sorted(candidates[:count])
    return masked, positions, [tokens[position] for position in positions]


def random_words(draw, sample, number, seed):
    """Three words of 32 bits, from the readable Philox of the model."""
    counter = (draw, sample & 0xFFFFFFFF, number, sample >> 32)
    a, b, c, _ = philox(counter, seed)  # of plain integers, which it takes as it takes tensors
    return int(a), int(b), int(c)
