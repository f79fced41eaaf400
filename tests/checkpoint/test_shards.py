"""Tensors come back from the files of several ranks to the bit, whole or in parts, here and in torch's own reader."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from omnitrain.checkpoint import disk, reading, shards
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.reading import rectangles
from omnitrain.checkpoint.shards import (
    Block,
    can_shard,
    files_of,
    own_blocks,
    staged,
    whole_files,
    write_shards,
    write_whole,
)
from omnitrain.checkpoint.tensors import DTYPES, Gathered, TensorFile, mark_of, save_tensors
from omnitrain.distributed import Ranks
from omnitrain.errors import CheckpointError

FS = FileSystem()
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def values_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of different values, as far as its type has as many."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).view(shape)
    return (torch.arange(count, dtype=torch.float32) % 120).to(dtype).view(shape)


def in_parts(tensor: torch.Tensor, begin: int, end: int) -> Gathered:
    return Gathered(
        tuple(tensor.shape), tensor.dtype, lambda: tensor, flat=lambda: (begin, tensor.reshape(-1)[begin:end])
    )


def write_flat(tensors: dict[str, torch.Tensor], folder: Path, world_size: int) -> dict[str, Any]:
    """Write equal ranges of tensors from as many ranks, and return the entries of all files."""
    found: dict[str, Any] = {}
    for rank in range(world_size):
        own = {
            name: in_parts(one, one.numel() * rank // world_size, one.numel() * (rank + 1) // world_size)
            for name, one in tensors.items()
        }
        found |= write_shards({name: own_blocks(one, rank) for name, one in own.items()}, folder, rank, FS)
    return found


def opened(folder: Path) -> TensorFile:
    return TensorFile(sorted(folder.glob("*.safetensors")))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


class Mesh:
    """A device mesh, as far as the placement of one rank asks for it."""

    def __init__(self, shape: tuple[int, ...], here: tuple[int, ...], ranks: torch.Tensor | None = None) -> None:
        self.shape, self.here = shape, here
        self.mesh: torch.Tensor = torch.arange(math.prod(shape)).view(shape) if ranks is None else ranks

    def get_coordinate(self) -> list[int]:
        return list(self.here)

    def only(self, dimensions: tuple[int, ...]) -> Mesh:
        """Return the mesh of some dimensions in which this rank is."""
        index = tuple(slice(None) if axis in dimensions else one for axis, one in enumerate(self.here))
        chosen = [tuple(one[axis] for axis in dimensions) for one in (self.shape, self.here)]
        return Mesh(*chosen, self.mesh[index])


class Placed:
    """A DTensor without processes: one rank's part of a tensor, cut by torch's own placements."""

    def __init__(self, tensor: torch.Tensor, mesh: Mesh, placements: list[Any]) -> None:
        self.shape, self.dtype, self.device_mesh, self.placements = tensor.shape, tensor.dtype, mesh, placements
        local = tensor
        for placement, parts, index in zip(placements, mesh.shape, mesh.here, strict=True):
            if not isinstance(placement, Replicate):
                local = placement._split_tensor(local, parts, with_padding=False)[0][index]
        self.local = local

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("this would be communication")

    def to_local(self) -> torch.Tensor:
        return self.local

    def numel(self) -> int:
        return self.shape.numel()


# --- rectangles


@given(shapes, st.data())
def test_a_flat_range_is_covered_by_few_rectangles_in_its_order(shape: tuple[int, ...], data: Any) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    found = rectangles(shape, begin, end)
    cut = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *cut]).tolist() == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


# --- what a rank writes


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((3,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((7,), [Shard(0)]),
        ((3,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
    ],
)
@pytest.mark.parametrize("shape", [(5, 7), (4, 4, 3), (1, 2), (6, 5, 1, 2), (0, 3)])
def test_parts_of_a_sharded_tensor_are_the_slices_of_the_whole(
    mesh: tuple[int, ...], placements: list[Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    whole, written = values_of(shape), 0
    for rank, here in enumerate(itertools.product(*map(range, mesh))):
        own = own_blocks(Placed(whole, Mesh(mesh, here), placements), rank)
        written += sum(block.tensor.numel() for block in own)
        write_shards({"w": own}, tmp_path, rank, FS)
    assert written == whole.numel(), "no rank writes what another does"
    source = opened(tmp_path)
    assert same(source["w"], whole)
    for begin, end in ((0, whole.numel()), (whole.numel() // 3, whole.numel() // 2), (whole.numel() // 2,) * 2):
        assert same(source.part("w", begin, end), whole.reshape(-1)[begin:end])
    if whole.numel():
        offsets, sizes = [one // 2 for one in shape], [one - one // 2 for one in shape]
        assert same(source.block("w", offsets, sizes), whole[tuple(slice(one, None) for one in offsets)])


@pytest.mark.parametrize(
    ("dimensions", "placements"),
    [
        ((0,), [Shard(0)]),
        ((1,), [Shard(1)]),
        ((2,), [Shard(0)]),
        ((0, 1), [Replicate(), Shard(0)]),
        ((0, 2), [Shard(0), Shard(1)]),
        ((0, 1, 2), [Replicate(), Shard(0), Shard(1)]),
    ],
)
@pytest.mark.parametrize("shape", [(5, 7), (1, 2), (0, 3)])
def test_a_tensor_of_some_dimensions_of_the_mesh_is_written_once(
    dimensions: tuple[int, ...], placements: list[Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    whole, sizes, blocks = values_of(shape), (2, 3, 2), list[Block]()
    for rank, here in enumerate(itertools.product(*map(range, sizes))):
        mesh = Mesh(sizes, here)
        own = own_blocks(Placed(whole, mesh.only(dimensions), placements), rank, mesh)
        write_shards({"w": own}, tmp_path, rank, FS)
        blocks += own
    assert sum(block.tensor.numel() for block in blocks) == whole.numel()
    assert len(blocks) == len({block.offsets for block in blocks}), "no rank writes what another does"
    assert same(opened(tmp_path)["w"], whole)


@given(shapes, st.integers(1, 6), st.data())
def test_any_part_and_block_of_flat_ranges_is_the_slice_of_the_whole(
    tmp_path_factory: Any, shape: tuple[int, ...], world_size: int, data: Any
) -> None:
    folder, whole = tmp_path_factory.mktemp("flat"), values_of(shape)
    write_flat({"w": whole}, folder, world_size)
    source = opened(folder)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    assert same(source.part("w", begin, end), whole.reshape(-1)[begin:end])
    offsets = [data.draw(st.integers(0, one)) for one in shape]
    sizes = [data.draw(st.integers(0, one - first)) for one, first in zip(shape, offsets, strict=True)]
    cut = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
    assert same(source.block("w", offsets, sizes), whole[cut])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_and_a_scalar_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": values_of((5, 3), dtype), "scalar": values_of((), dtype), "empty": values_of((0, 2), dtype)}
    write_flat(tensors, tmp_path, 2)
    source = opened(tmp_path)
    assert source.keys() == tensors.keys()
    for name, one in tensors.items():
        assert source.spec_of(name) == (tuple(one.shape), dtype) and same(source[name], one)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_conjugated_and_a_negated_view_are_written_with_their_values(is_whole: bool, tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"conjugate": number.conj(), "negative": number.conj().imag, "rows": torch.ones(2, 2) * 1j}
    tensors["rows"] = tensors["rows"].conj().T
    tensors["one"] = torch.arange(4.0)[1::4]
    if is_whole:
        save_tensors(tensors, tmp_path / "one.safetensors")
    else:
        write_flat(tensors, tmp_path, 2)
        write_shards({"whole": own_blocks(number.conj(), 0)}, tmp_path, 2, FS)
        tensors["whole"] = number.conj()
    source = opened(tmp_path)
    for name, one in tensors.items():
        assert torch.equal(source[name], one.resolve_conj().resolve_neg()), name
        assert mark_of(one)[1]


def test_a_whole_tensor_is_written_by_the_first_rank_alone() -> None:
    assert len(own_blocks(torch.ones(3), 0)) == 1 and own_blocks(torch.ones(3), 1) == []


def test_what_must_be_gathered_is_refused() -> None:
    gathered = Gathered((3,), torch.float32, lambda: torch.ones(3))
    assert not can_shard({"a": gathered}) and can_shard({"a": torch.ones(3), "b": in_parts(torch.ones(3), 0, 1)})
    with pytest.raises(ValueError, match="no parts to write"):
        own_blocks(gathered, 0)


def test_staged_blocks_do_not_change_with_the_tensors_and_use_their_memory_again(tmp_path: Path) -> None:
    whole, kept = values_of((4, 3)), {}
    first = staged({"w": in_parts(whole, 1, 8), "v": whole}, 0, kept)
    places = {name: one.data_ptr() for name, one in kept.items()}
    whole += 1
    assert torch.cat([one.tensor.reshape(-1) for one in first["w"]]).tolist() == list(range(1, 8))
    staged({"w": in_parts(whole, 1, 8), "v": whole}, 0, kept)
    assert {name: one.data_ptr() for name, one in kept.items()} == places and kept["v:0"][0, 0] == 1


# --- files


def test_size_and_hash_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PIECE", 1 << 10)
    monkeypatch.setattr(shards, "_SMALL", 1 << 9)
    big = values_of((70, 50))
    own = {"big": own_blocks(big, 0), "turned": own_blocks(big.T, 0), "few": own_blocks(torch.ones(2), 0)}
    found = write_shards({**own, **{f"x{i}": own_blocks(in_parts(big, 3, 2999), 0) for i in range(3)}}, tmp_path, 0, FS)
    assert sorted(found) == sorted(file.name for file in tmp_path.iterdir()) and len(found) == 3
    for name, entry in found.items():
        data = (tmp_path / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stored = safetensors.torch.load_file(tmp_path / "rank-00000.safetensors")
    assert same(stored["big"], big) and same(stored["turned"], big.T)


def test_a_rank_without_blocks_writes_no_file(tmp_path: Path) -> None:
    assert write_shards({"w": []}, tmp_path, 1, FS) == {} == write_shards({}, tmp_path, 1, FS)
    assert not list(tmp_path.iterdir())


def test_files_are_made_and_synced_by_the_file_system(tmp_path: Path) -> None:
    done: list[tuple[str, str]] = []

    class Watched(FileSystem):
        def create(self, path: Path, pieces: Iterable[bytes | memoryview]) -> None:
            super().create(path, pieces)
            done.append(("create", path.name))

        def sync(self, path: Path) -> None:
            done.append(("sync", path.name))

    write_shards({"w": own_blocks(in_parts(values_of((4, 3)), 1, 8), 0)}, tmp_path, 0, Watched())
    names = ["rank-00000.safetensors", "rank-00000.1.safetensors", "rank-00000.2.safetensors"]
    assert done == [(what, name) for name in names for what in ("create", "sync")]


@pytest.mark.parametrize("hint", ["taken", "refused", "unknown"])
def test_the_disk_is_told_to_take_what_was_written_before_the_end(
    hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []

    def advise(descriptor: int, begin: int, length: int, advice: int) -> None:
        told.append((begin, length))
        if hint == "refused":
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk, "_AT_ONCE", 8)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    if hint == "unknown":
        monkeypatch.delattr(os, "posix_fadvise")
    disk.write_pieces(tmp_path / "file", [b"abc", memoryview(b"d" * 20), b"", b"e" * 4])
    assert (tmp_path / "file").read_bytes() == b"abc" + b"d" * 20 + b"e" * 4
    assert told == ([] if hint == "unknown" else [(0, 11), (11, 8), (19, 8)])


def test_a_full_disk_is_the_error_of_the_write(tmp_path: Path) -> None:
    class Full(FileSystem):
        def create(self, path: Path, pieces: Iterable[bytes | memoryview]) -> None:
            next(iter(pieces))
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_shards({"w": own_blocks(torch.ones(1 << 20), 0)}, tmp_path, 0, Full())


# --- torch's own reader and writer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_torch_reads_what_was_written_here(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": values_of((5, 4, 3), dtype), "b": values_of((11,), dtype)}
    write_flat(tensors, tmp_path, 3)
    target = {name: torch.zeros_like(one) for name, one in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(same(target[name], one) for name, one in tensors.items())


def test_what_torch_wrote_is_read_here(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5, 3), "b": torch.randn(4).bfloat16()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True),
            no_dist=True,
        )
    source = opened(tmp_path)
    assert all(same(source[name], one) for name, one in tensors.items())
    assert same(source.block("w", (2, 1), (3, 2)), tensors["w"][2:, 1:])


def test_torch_consolidates_what_was_written_here(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "whole").mkdir()
    tensors = {"w": torch.randn(5, 3), "b": torch.randn(4).bfloat16()}
    write_flat(tensors, tmp_path / "shards", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        consolidate_safetensors_files(str(tmp_path / "shards"), str(tmp_path / "whole"), dict.fromkeys(tensors, 1))
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    found = safetensors.torch.load_file(file)
    assert all(same(found[name], one) for name, one in tensors.items())


# --- damage


def test_blocks_without_the_whole_shape_say_it_together(tmp_path: Path) -> None:
    whole = values_of((4, 3))
    for rank in range(2):
        write_shards({"w": [Block((2 * rank, 0), whole[2 * rank : 2 * rank + 2])]}, tmp_path, rank, FS)
    assert same(opened(tmp_path)["w"], whole)


def test_the_same_block_in_two_files_is_read_once(tmp_path: Path) -> None:
    whole = values_of((4, 3))
    for rank, begin in enumerate((0, 0, 2)):
        write_shards({"w": [Block((begin, 0), whole[begin : begin + 2], (4, 3))]}, tmp_path, rank, FS)
    assert same(opened(tmp_path)["w"], whole)


def test_a_missing_shard_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    write_flat({"w": values_of((6, 3))}, tmp_path, 3)
    (tmp_path / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: none of its 2 files has 6 of its 18 values of 'w'"):
        opened(tmp_path)


def test_blocks_that_overlap_but_do_not_cover_are_an_error(tmp_path: Path) -> None:
    for rank, begin in enumerate((0, 1)):
        write_shards({"w": [Block((begin,), torch.ones(3), (5,))]}, tmp_path, rank, FS)
    with pytest.raises(CheckpointError, match=r"has the block of \(1,\) at \(4,\) of 'w'"):
        opened(tmp_path)["w"]


def test_shards_that_differ_in_dtype_are_an_error(tmp_path: Path) -> None:
    write_shards({"w": [Block((0,), torch.ones(3), (6,))]}, tmp_path, 0, FS)
    write_shards({"w": [Block((3,), torch.ones(3).half(), (6,))]}, tmp_path, 1, FS)
    with pytest.raises(CheckpointError, match="differ in dtype"):
        opened(tmp_path)


def test_a_file_that_was_cut_is_an_error_before_and_while_it_is_read(tmp_path: Path) -> None:
    write_flat({"w": values_of((64, 3))}, tmp_path, 2)
    source, file = opened(tmp_path), tmp_path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="shorter than its header"):
        source.part("w", 100, 192)
    assert same(source.part("w", 0, 96), values_of((64, 3)).view(-1)[:96])
    with pytest.raises(CheckpointError, match="is damaged"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "place",
    ["[]", "{", '{"w": []}', '{"w": {}}', '{"w": {"saved_offsets": [-1, 0]}}', '{"w": {"saved_offsets": [0]}}',
     '{"w": {"saved_offsets": [0, 1], "shape": [2, 2]}}', '{"w": {"saved_offsets": [0, 0], "shape": 4}}'],
)  # fmt: skip
def test_nonsense_about_where_a_block_belongs_is_an_error(place: str, tmp_path: Path) -> None:
    file = tmp_path / "rank-00000.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2, 2)}, file, {"DCP_SHARDING_INFO": place})
    with pytest.raises(CheckpointError, match="is damaged"):
        TensorFile(file)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (2, 1), (0, 13)])
def test_a_part_outside_of_the_tensor_is_refused(begin: int, end: int, tmp_path: Path) -> None:
    write_flat({"w": values_of((4, 3))}, tmp_path, 1)
    with pytest.raises(ValueError, match="12 values"):
        opened(tmp_path).part("w", begin, end)
    with pytest.raises(ValueError, match="is not in it"):
        opened(tmp_path).block("w", (3, begin), (1, 4))


# --- what reading costs


def test_reading_takes_what_is_asked_for_and_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, made = values_of((256, 64)), []
    save_tensors({"w": whole}, tmp_path / "rank-00000.safetensors")
    source = opened(tmp_path)
    monkeypatch.setattr(reading, "_BUFFER", 1 << 12)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    found = source.block("w", (0, 3), (256, 4))
    monkeypatch.undo()
    assert same(found, whole[:, 3:7])
    assert [one.numel() * 4 for one in made] == [256 * 4 * 4, 1 << 12]


@pytest.mark.parametrize(("buffer", "run"), [(1 << 26, 1 << 16), (64, 1 << 16), (1 << 26, 8), (8, 8)])
def test_blocks_are_the_same_however_they_are_read(
    buffer: int, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BUFFER", buffer)
    monkeypatch.setattr(reading, "_RUN", run)
    whole = values_of((4, 5, 6))
    save_tensors({"w": whole}, tmp_path / "rank-00000.safetensors")
    source = opened(tmp_path)
    for box in itertools.product(*[[(0, n), (1, n - 1), (1, 2)] for n in whole.shape]):
        offsets, sizes = zip(*box, strict=True)
        cut = tuple(slice(a, a + n) for a, n in box)
        assert same(source.block("w", offsets, sizes), whole[cut])


class OneOfMany(Ranks):
    """A rank of many that makes no exchange: what it opens by itself can be counted."""

    rank, world_size = 5, 8

    def sum(self, what: str, *values: float) -> list[float]:
        return [8 * one for one in values]


def test_a_rank_that_reads_its_slice_opens_the_file_of_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, touched = values_of((16, 3)), []
    for rank in range(8):
        write_shards({"w": [Block((2 * rank, 0), whole[2 * rank : 2 * rank + 2], (16, 3))]}, tmp_path, rank, FS)
    source = TensorFile(sorted(tmp_path.iterdir()), OneOfMany())
    source._headers.clear()  # those that the main rank has read
    read = reading.read_marked_header
    monkeypatch.setattr(reading, "read_marked_header", lambda path: touched.append(path.name) or read(path))
    assert source.is_local and same(source.block("w", (10, 0), (2, 3)), whole[10:12])
    assert touched == ["rank-00005.safetensors"]


def of_rows(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The first row that a rank has of as many, and how many, as PyTorch divides them."""
    most = -(-rows // world_size)
    begin = min(rows, rank * most)
    return begin, min(rows, begin + most) - begin


@pytest.fixture(scope="module")
def of_many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The files of 60 ranks: rows for all, for some, and unevenly many; columns; and what the first rank alone has."""
    folder = tmp_path_factory.mktemp("many")
    whole = {name: values_of(shape) for name, shape in {"even": (120, 2), "few": (40, 2), "odd": (130, 3)}.items()}
    whole |= {"columns": values_of((2, 60)), "step": torch.tensor(3.0)}
    for rank in range(60):
        blocks = {
            name: [Block((at, 0), one[at : at + count], tuple(one.shape))] if count else []
            for name, one in whole.items()
            if one.dim()
            for at, count in [of_rows(len(one), 60, rank)]
        }
        blocks["columns"] = [Block((0, rank), whole["columns"][:, rank : rank + 1], (2, 60))]
        blocks["step"] = [Block((), whole["step"], ())] if rank == 0 else []
        write_shards(blocks, folder, rank, FS)
    return folder, whole


@pytest.mark.parametrize(("world_size", "rank"), [(60, 0), (60, 39), (60, 59), (8, 3), (8, 7), (7, 5), (100, 99)])
def test_a_rank_opens_no_more_files_than_have_its_part_and_two_where_there_are_many(
    of_many: Any, monkeypatch: pytest.MonkeyPatch, world_size: int, rank: int
) -> None:
    folder, whole = of_many
    touched: set[str] = set()
    source = opened(folder)
    source._headers.clear()
    source._ranks = Ranks()
    source._ranks.rank, source._ranks.world_size = rank, world_size
    read = reading.read_marked_header
    monkeypatch.setattr(reading, "read_marked_header", lambda path: touched.add(path.name) or read(path))
    for name in ("even", "few", "odd"):
        source._headers.clear()
        touched.clear()
        at, count = of_rows(len(whole[name]), world_size, rank)
        assert same(source.block(name, (at, 0), (count, whole[name].shape[1])), whole[name][at : at + count])
        has_it = [
            one for one in range(60) for a, n in [of_rows(len(whole[name]), 60, one)] if a < at + count and at < a + n
        ]
        assert len(touched) <= len(has_it) + 2
    source._headers.clear()
    touched.clear()
    assert same(source.part("step", 0, 1), whole["step"].view(1)) and touched == {sorted(folder.iterdir())[0].name}
    touched.clear()
    column = rank * 60 // world_size
    assert same(source.block("columns", (0, column), (2, 1)), whole["columns"][:, column : column + 1].contiguous())
    assert len(touched) <= 1


def test_what_was_found_in_the_files_is_not_looked_for_again(of_many: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole = of_many
    first = opened(folder)
    touched = []
    read = reading.read_marked_header
    monkeypatch.setattr(reading, "read_marked_header", lambda path: touched.append(path.name) or read(path))
    again = TensorFile(sorted(folder.iterdir()), None, first.catalogue)
    assert not touched and again.spec_of("odd") == ((130, 3), torch.float32)
    assert all(same(again[name], one) for name, one in whole.items())


def test_a_file_that_another_rank_sees_otherwise_is_not_read(tmp_path: Path) -> None:
    write_flat({"w": values_of((4, 3))}, tmp_path, 1)
    source = opened(tmp_path)
    source._headers.clear()
    write_flat({"w": values_of((3, 4))}, tmp_path, 1)
    with pytest.raises(CheckpointError, match="is another file on rank 0"):
        source.part("w", 0, 4)


# --- consolidating


def test_whole_files_are_those_of_transformers_whoever_writes_them(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(6)} | {"s": torch.tensor(2.0)}
    (tmp_path / "shards").mkdir()
    write_flat(tensors, tmp_path / "shards", 4)
    source, contents = opened(tmp_path / "shards"), []
    for world_size in (1, 3):
        out = tmp_path / f"out{world_size}"
        out.mkdir()
        entries: dict[str, Any] = {}
        for rank in range(world_size):
            entries |= write_whole(source, out, rank, world_size, FS, limit=100)
        assert sorted(entries) == sorted(file.name for file in out.iterdir())
        for name, entry in entries.items():
            assert entry["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        contents.append({file.name: file.read_bytes() for file in out.iterdir()})
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 4 * (21 * 3 + 1)} and index["weight_map"].keys() == tensors.keys()
        for name, file in index["weight_map"].items():
            assert same(safetensors.torch.load_file(out / file)[name], tensors[name])
            assert "-of-00004" in file
    assert contents[0] == contents[1]


@pytest.mark.parametrize("limit", [100, 400, 10**6])
def test_the_ranks_that_have_a_file_of_whole_weights_to_write_are_known_before(tmp_path: Path, limit: int) -> None:
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(6)}
    write_flat(tensors, tmp_path, 4)
    source, count = opened(tmp_path), whole_files(tensors, limit)
    for rank in range(10):
        (out := tmp_path / f"out{rank}").mkdir()
        assert bool(write_whole(source, out, rank, 10, FS, limit)) is (rank < count)


def test_the_files_of_all_ranks_are_opened_once_for_all_small_weights(
    of_many: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = of_many
    source, touched = opened(folder), []
    read = reading.open_regular
    monkeypatch.setattr(reading, "open_regular", lambda path: touched.append(path.name) or read(path))
    write_whole(source, tmp_path, 0, 1, FS)
    assert sorted(touched) == sorted(file.name for file in folder.iterdir())
    assert all(
        same(one, whole[name]) for name, one in safetensors.torch.load_file(tmp_path / "model.safetensors").items()
    )


@pytest.mark.parametrize("at_once", [8, 50, 1 << 24])
def test_few_weights_are_consolidated_into_the_file_that_a_whole_model_is_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(shards, "_PIECE", 64)
    monkeypatch.setattr(shards, "_AT_ONCE", at_once)
    tensors = {"w": torch.randn(7, 3), "b": torch.randn(4).bfloat16(), "s": torch.tensor(True), "e": torch.empty(0, 2)}
    write_flat(tensors, tmp_path, 3)
    found = write_whole(opened(tmp_path), tmp_path, 0, 1, FS)
    save_tensors(tensors, tmp_path / "as_before")
    assert list(found) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "as_before").read_bytes()


@pytest.mark.parametrize(
    ("files", "part", "expected"),
    [
        (["model.safetensors", "optimizer/state.safetensors"], "model", ["model.safetensors"]),
        (["model.safetensors", "optimizer/state.safetensors"], "optimizer", ["optimizer/state.safetensors"]),
        (["model/rank-00001.safetensors", "model/rank-00000.1.safetensors", "model/rank-00000.safetensors"], "model",
         ["model/rank-00000.1.safetensors", "model/rank-00000.safetensors", "model/rank-00001.safetensors"]),
        (["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
          "states.safetensors"], "model", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (["optimizer/rank-00000.safetensors", "model.safetensors"], "optimizer", ["optimizer/rank-00000.safetensors"]),
        (["states.safetensors", "model/config.json"], "model", []),
    ],
)  # fmt: skip
def test_files_of_a_part_are_found_by_their_names(files: list[str], part: str, expected: list[str]) -> None:
    assert files_of(Path("run"), files, part) == [Path("run") / name for name in expected]
