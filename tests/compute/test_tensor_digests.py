"""Digests of tensors: every bit and every place counts, shards add up, rows may come in any order."""

from __future__ import annotations

import itertools

import pytest
import torch

from omnitrain.compute import tensor_digests
from omnitrain.compute.tensor_digests import digest_rows, digest_tensors, digest_words, format_digest, to_words


def digest(*tensors: torch.Tensor) -> str:
    total = digest_tensors(tensors)
    assert total is not None
    return format_digest(total.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [1, 3, 300, 5000])
def test_digest_sees_every_value_and_place(dtype: torch.dtype, size: int) -> None:
    values = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(values) == digest(values.clone())
    for place in {0, size // 2, size - 1}:
        changed = values.clone()
        changed[place] = 1 - changed[place].int()
        assert digest(changed) != digest(values)
    if size > 1:
        values[0], values[-1] = 0, 1
        assert digest(values) != digest(values[[-1, *range(1, size - 1), 0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_digest_sees_signs_and_smallest_differences(dtype: torch.dtype) -> None:
    """The signs of floats are the highest bits of words, which must not cancel out in pairs."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [values.clone() for _ in range(5)]
    for weights, place in zip(changed, (..., 0, (slice(None), slice(3, None, 4)), (3, [3, 7])), strict=False):
        weights[place] *= -1
    changed[4][5, 20] = torch.nextafter(values[5, 20], torch.tensor(10.0, dtype=dtype))
    assert len({digest(weights) for weights in (values, *changed)}) == 6
    assert len({format_digest(digest_rows([weights]).tolist()) for weights in (values, *changed)}) == 6
    assert digest(-torch.zeros(4, dtype=dtype)) != digest(torch.zeros(4, dtype=dtype))


def test_digest_ignores_memory_layout() -> None:
    weights = torch.randn(6, 8, 5, 7)
    odd = torch.randn(1001)[1:]  # its bytes begin in the middle of a word
    assert digest(weights.to(memory_format=torch.channels_last)) == digest(weights)
    assert digest(odd) == digest(odd.clone())
    assert digest(weights, odd) != digest(odd, weights)
    assert digest(torch.tensor([0.0, 2.0, 0.0, 0.0]).to_sparse()) == digest(torch.tensor([0.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize("chunk", [1 << 22, 1024])
def test_digest_adds_up_over_shards(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digests, "_CHUNK", chunk)
    words = to_words(torch.randn(5000, dtype=torch.float64))
    full = digest_words(words)
    for cuts in ([0, 2500, 5000], [0, 1, 255, 1025, 5000], [0, 4999, 5000]):
        parts = [digest_words(words[a:b], a) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.stack(parts).sum(0), full)
    tensors = [torch.randn(size) for size in (3, 4000, 10, 1, 6000)]
    start, total = 0, torch.zeros(2, dtype=torch.int64)
    for tensor in tensors:
        total += digest_words(to_words(tensor), start)
        start += len(to_words(tensor))
    assert format_digest(total.tolist()) == digest(*tensors)


def test_digest_of_rows_ignores_their_order() -> None:
    x, y = torch.randn(8, 3), torch.arange(8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    full = digest_rows([x, y])
    assert torch.equal(full, digest_rows([x[order], y[order]]))
    assert torch.equal(full, digest_rows([x[:3], y[:3]]) + digest_rows([x[3:], y[3:]]))
    assert not torch.equal(full, digest_rows([x, y[order]]))  # the labels of other rows
    assert not torch.equal(full, digest_rows([x, y.flip(0)]))
    assert not torch.equal(digest_rows([y, y + 1]), digest_rows([y + 1, y]))
