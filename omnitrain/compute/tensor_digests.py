"""Digests of tensors, computed on their device.

A digest is a pair of int64: sums of the tensors' 64-bit words, modulo 2^64, each times a factor of its place. Sums of
integers depend on no order, so shards on several ranks can be added up, and the digest of an update is that of the
weights after it minus that before it. The high bits of a word are added to its low ones first: modulo 2^64, the highest
bit times any odd factor is the same, and the signs of two floats would cancel out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from omnitrain.compute.random_state import derive_seed

# Words in a row, and in a chunk: the factor of a word is that of its column, or of its row, times that of its chunk.
_ROW = 256
_CHUNK = 1 << 22
# Words at a time on a CPU, so that they stay in its cache.
_BLOCK = 1 << 17


def to_signed(value: int) -> int:
    """Return an integer modulo 2^64, in the range of int64.

    >>> to_signed(2**64 - 1), to_signed(5)
    (-1, 5)
    """
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def format_digest(words: Sequence[int]) -> str:
    """Return a digest as 32 hexadecimal digits.

    >>> format_digest([1, -1])
    '0000000000000001ffffffffffffffff'
    """
    return "".join(f"{word % (1 << 64):016x}" for word in words)


@functools.lru_cache(maxsize=64)
def _factors(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random numbers; of two counts, the shorter are the beginning of the longer ones."""
    values = torch.arange(count, dtype=torch.int64) * to_signed(derive_seed(seed) | 1)
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        values = (values ^ (values >> shift)) * factor
    return ((values ^ (values >> 31)) | 1).to(device)


def to_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in row-major order, as int64; the last word is filled up with zeros."""
    flat = tensor.detach()
    if flat.is_sparse:
        flat = flat.to_dense()
    elif flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    flat = flat.reshape(-1)
    if flat.nbytes % 8:
        octets = flat.view(torch.uint8)
        flat = torch.cat([octets, octets.new_zeros(-len(octets) % 8)])
    elif flat.data_ptr() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _fold(words: torch.Tensor) -> torch.Tensor:
    """Return words to whose low bits the high ones are added."""
    return (words >> 17).add_(words)


def digest_words(words: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the digest of words that begin at a place of a longer sequence, as two int64 on their device."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    while len(words):
        chunk, place = divmod(start, _CHUNK)
        size = min(_CHUNK - place, _BLOCK - place % _ROW if words.is_cpu else _CHUNK)
        part, words = _fold(words[:size]), words[size:]
        start += len(part)
        if place % _ROW:
            part = torch.cat([part.new_zeros(place % _ROW), part])
        count = len(part) // _ROW
        grid, rest = part[: count * _ROW].view(count, _ROW), part[count * _ROW :]
        columns, rows = grid.sum(0), grid.sum(1)
        if len(rest):
            columns[: len(rest)] += rest
            rows = torch.cat([rows, rest.sum(0, keepdim=True)])
        first = place // _ROW
        by_row = _factors(_CHUNK // _ROW, 2, words.device)[first : first + len(rows)]
        pair = torch.stack([(columns * _factors(_ROW, 1, words.device)).sum(), (rows * by_row).sum()])
        total += pair * to_signed(derive_seed(3, chunk) | 1)
    return total


def digest_tensors(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the digest of tensors on the same device, in order; None if there is none.

    Each begins with a new word, after those of the ones before it. None has no words.
    """
    total: torch.Tensor | None = None
    group, size, start = list[torch.Tensor](), 0, 0

    def flush() -> None:
        nonlocal total, group, size, start
        if group:
            part = digest_words(group[0] if len(group) == 1 else torch.cat(group), start)
            total = part if total is None else total + part
            group, size, start = [], 0, start + size

    for tensor in tensors:
        if tensor is None:
            continue
        words = to_words(tensor)
        if size + len(words) > _CHUNK:
            flush()
        group.append(words)
        size += len(words)
    flush()
    return total


def digest_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest of the rows of several tensors: the same in any order of the rows, and however they are split.

    The tensors are of the same device, with equally many rows.
    """
    count = len(tensors[0])
    hashes = torch.zeros(count, dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        size = tensor[0].numel() * tensor.element_size()
        if size % 8:
            octets = tensor.detach().reshape(count, -1).view(torch.uint8)
            tensor = torch.cat([octets, octets.new_zeros(count, -size % 8)], 1)
        words = to_words(tensor).view(count, -1)
        places = _factors(words.shape[1], 4, words.device)
        hashes = (hashes + number + 1) * to_signed(derive_seed(5) | 1) + (_fold(words) * places).sum(1)
    pairs = []
    for shift in (29, 33):  # mixed, or an exchange of two rows' entries would not show in the sum
        mixed = (hashes ^ (hashes >> shift)) * to_signed(derive_seed(shift) | 1)
        pairs.append(((mixed ^ (mixed >> 32)) * 0x3F58476D1CE4E5B9).sum())
    return torch.stack(pairs)
