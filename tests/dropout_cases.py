"""Checks of dropout on every device, against plain integers and the CPU's kernels."""

import torch

from mlperf_bert.model import dropout as on_cpu
from mlperf_bert.model.dropout_keys import DropoutKeys, DropoutSite, scale_of, threshold_of

SEED = 0x1234_5678_9ABC_DEF0  # both words of the key are used
SHAPES = ((1, 1), (7, 8), (33, 37), (20, 300))  # rows, channels
LENGTHS = ((5,), (70, 1, 7, 64, 0), (3, 0, 17, 0, 0))
NUM_HEADS = 3
SPARE_ROWS = 5  # of no sequence
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def make_keys(num_rows, device="cpu", seed=SEED, step=3):
    """Different for every row, ids of more than 32 bits among them."""
    rows = torch.arange(num_rows)
    return DropoutKeys(
        seed,
        torch.tensor([step], device=device),
        (rows * 0x1_0000_0007 // 3 + 5).to(device),
        (rows * 13 % 512).to(device),
    )


def site_of(num_rows, probability=0.3, device="cpu", stream=9):
    return DropoutSite(probability, stream, make_keys(num_rows, device))


def plain_words(counter, seed, rounds):
    """Philox 4x32 as its paper has it, in Python's integers (Salmon et al., SC 2011)."""
    words = list(counter)
    for number in range(rounds):
        keys = (seed + number * 0x9E3779B9, (seed >> 32) + number * 0xBB67AE85)
        products = (0xD2511F53 * words[0], 0xCD9E8D57 * words[2])
        words = [
            (products[1] >> 32) ^ words[1] ^ (keys[0] % 2**32),
            products[1] % 2**32,
            (products[0] >> 32) ^ words[3] ^ (keys[1] % 2**32),
            products[0] % 2**32,
        ]
    return words


def plain_is_kept(site, row, channel, head=0):
    """One element, as docs/concepts/numerics.md defines it; in attention a channel is a key."""
    keys = site.keys
    counter = (
        channel // 8 + (head << 16),
        int(keys.positions[row]) + (site.stream << 16),
        int(keys.sample_ids[row]) % 2**32,
        int(keys.step) % 2**32,
    )
    words = plain_words(counter, keys.seed, rounds=7)
    bits = words[channel % 8 // 2] >> 16 * (channel % 2)
    return bits % 2**16 >= threshold_of(site.probability)


def is_kept(bits, channels):
    """Bool [..., channels] of keep bits [..., bytes]."""
    shifts = torch.arange(8, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).flatten(-2)[..., :channels].bool()


def check_keep_bits(kernels, device):
    for num_rows, channels in SHAPES:
        found = kernels.keep_bits(site_of(num_rows, device=device), channels)
        expected = on_cpu.keep_bits(site_of(num_rows), channels)
        assert torch.equal(found.cpu(), expected)


def check_attention_keep_bits(kernels, device):
    for lengths in map(torch.tensor, LENGTHS):
        fewer = torch.arange(len(lengths)).flip(0) % 3
        for longest, queries in ((int(lengths.max()), lengths), (133, fewer)):
            _check_attention(kernels, device, lengths, queries, longest)


def _check_attention(kernels, device, lengths, queries, max_seqlen):
    num_rows = int(queries.sum()) + SPARE_ROWS
    cu_seqlens, cu_queries = (
        torch.cat((torch.zeros(1), each.cumsum(0))).to(device, torch.int32)
        for each in (lengths, queries)
    )
    found = kernels.attention_keep_bits(
        site_of(num_rows, device=device),
        NUM_HEADS,
        cu_seqlens,
        max_seqlen,
        None if queries is lengths else cu_queries,
    ).cpu()
    expected = on_cpu.attention_keep_bits(
        site_of(num_rows), NUM_HEADS, cu_seqlens.cpu(), max_seqlen
    )
    assert found.shape == expected.shape == (num_rows, NUM_HEADS, -(-max_seqlen // 8))
    row = 0
    for length, count in zip(lengths.tolist(), queries.tolist(), strict=True):
        rows, num_bytes = slice(row, row + count), -(-length // 8)
        assert torch.equal(found[rows, :, :num_bytes], expected[rows, :, :num_bytes])
        row += count


def check_dropout(dropout, device):
    """Forward and backward, of every dtype and of more than two dimensions."""
    for dtype in DTYPES:
        for num_rows, channels in (*SHAPES, (0, 5), (5, 0)):
            _check_dropout(dropout, device, torch.randn(num_rows, channels), dtype)
        _check_dropout(dropout, device, torch.randn(4, 5, 3).transpose(1, 2), dtype)


def _check_dropout(dropout, device, values, dtype):
    num_rows, channels = len(values), values.shape[1:].numel()
    x = values.to(device, dtype).requires_grad_()
    output = dropout(x, site_of(num_rows, device=device))
    (gradient,) = torch.autograd.grad(output, x, 2 * torch.ones_like(output))
    bits = on_cpu.keep_bits(site_of(num_rows), channels)
    # Computed in float32 at least, then rounded once.
    precise = torch.promote_types(dtype, torch.float32)
    factors = is_kept(bits, channels).to(precise).view(values.shape) * scale_of(0.3)
    expected = (x.detach().cpu().to(precise) * factors).to(dtype)
    assert output.dtype == gradient.dtype == dtype
    assert torch.equal(output.cpu(), expected)
    assert torch.equal(gradient.cpu(), (2 * factors).to(dtype))


CHECKS = (check_keep_bits, check_attention_keep_bits)  # of kernels
