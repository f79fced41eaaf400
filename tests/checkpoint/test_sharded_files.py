"""Tensors in the files of several ranks: written, read in full and in parts, by omnitrain and by PyTorch."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from disks import FaultyDisk, fail_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from omnitrain.checkpoint import sharded_files, tensor_files
from omnitrain.checkpoint.sharded_files import Block, can_shard, local_blocks, write_full_files, write_shards
from omnitrain.checkpoint.tensor_files import DTYPES, Gathered, TensorFile, change_marker, host_copy, save_tensors
from omnitrain.core import files
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import FileSystem
from omnitrain.distributed.ranks import Ranks

FS = FileSystem()
Shape = tuple[int, ...]
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def values_of(shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of different values, as far as its type has as many."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).view(shape)
    return (torch.arange(count, dtype=torch.float32) % 120).to(dtype).view(shape)


def flat_part(tensor: torch.Tensor, begin: int, end: int) -> Gathered:
    """Return a tensor of which this rank has a range of its values."""
    return Gathered(
        tuple(tensor.shape), tensor.dtype, lambda: tensor, flat=lambda: (begin, tensor.reshape(-1)[begin:end])
    )


def write_flat(tensors: dict[str, torch.Tensor], folder: Path, world_size: int) -> dict[str, Any]:
    """Write equal ranges of tensors from so many ranks, and return the entries of all files."""
    entries: dict[str, Any] = {}
    for rank in range(world_size):
        parts = {
            name: flat_part(tensor, tensor.numel() * rank // world_size, tensor.numel() * (rank + 1) // world_size)
            for name, tensor in tensors.items()
        }
        entries |= write_shards({name: local_blocks(part, rank) for name, part in parts.items()}, folder, rank, FS)
    return entries


def write_rows(tensor: torch.Tensor, begins: Iterable[int], count: int, folder: Path, **shape: Shape) -> None:
    """Write so many rows of a tensor from each rank, beginning at these; without a shape as PyTorch does."""
    for rank, begin in enumerate(begins):
        block = {"saved_offsets": (begin, *(0 for _ in tensor.shape[1:])), **shape}
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": block})}
        rows = {"w": tensor[begin : begin + count].contiguous()}
        safetensors.torch.save_file(rows, folder / f"rank-{rank:05}.safetensors", metadata)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def entry_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def opened(folder: Path) -> TensorFile:
    return TensorFile(files_in(folder))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


class Mesh:
    """A device mesh, as far as the placement of one rank needs it."""

    def __init__(self, shape: Shape, coordinate: Shape, ranks: torch.Tensor | None = None) -> None:
        self.shape, self.coordinate = shape, coordinate
        self.mesh: torch.Tensor = torch.arange(math.prod(shape)).view(shape) if ranks is None else ranks

    def get_coordinate(self) -> list[int]:
        return list(self.coordinate)

    def only(self, dimensions: Shape) -> Any:
        """Return the mesh of some dimensions in which this rank is."""
        index = tuple(slice(None) if axis in dimensions else at for axis, at in enumerate(self.coordinate))
        chosen = [tuple(sizes[axis] for axis in dimensions) for sizes in (self.shape, self.coordinate)]
        return Mesh(*chosen, self.mesh[index])


class Placed:
    """A DTensor without processes: one rank's part of a tensor, by PyTorch's placements."""

    def __init__(self, tensor: torch.Tensor, mesh: Mesh, placements: list[Any]) -> None:
        self.shape, self.dtype, self.device_mesh, self.placements = tensor.shape, tensor.dtype, mesh, placements
        self.local = tensor
        for placement, parts, index in zip(placements, mesh.shape, mesh.coordinate, strict=True):
            if not isinstance(placement, Replicate):
                self.local = placement._split_tensor(self.local, parts, with_padding=False)[0][index]

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("this would communicate")

    def to_local(self) -> torch.Tensor:
        return self.local

    def numel(self) -> int:
        return self.shape.numel()


@pytest.mark.parametrize(("mesh", "dimensions", "placements"), [
    ((3,), (0,), [Shard(1)]), ((7,), (0,), [Shard(0)]), ((3,), (0,), [Replicate()]),
    ((2, 2), (0, 1), [Replicate(), Shard(0)]), ((2, 3), (0, 1), [Shard(0), Shard(1)]),
    ((2, 2), (0, 1), [Shard(0), Shard(0)]), ((3, 2), (0, 1), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), (0, 1), [_StridedShard(1, split_factor=2), Shard(1)]), ((2, 3, 2), (0,), [Shard(0)]),
    ((2, 3, 2), (1,), [Shard(1)]), ((2, 3, 2), (0, 1), [Replicate(), Shard(0)]),
    ((2, 3, 2), (0, 2), [Shard(0), Shard(1)]), ((2, 3, 2), (0, 1, 2), [Replicate(), Shard(0), Shard(1)]),
])  # fmt: skip
def test_sharded_tensor_reads_as_slices_of_the_full(
    mesh: Shape, dimensions: Shape, placements: list[Any], tmp_path: Path
) -> None:
    """Also if it is on some dimensions of a mesh only; no rank writes what another does."""
    for shape in ((5, 7), (4, 4, 3), (1, 2), (6, 5, 1, 2), (0, 3)):
        if len(shape) <= max((getattr(placement, "dim", 0) for placement in placements), default=0):
            continue
        folder, full, written = tmp_path / str(shape), values_of(shape), list[Block]()
        folder.mkdir()
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
            whole = Mesh(mesh, coordinate)
            blocks = local_blocks(Placed(full, whole.only(dimensions), placements), rank, whole)
            written += blocks
            write_shards({"w": blocks}, folder, rank, FS)
        assert sum(block.tensor.numel() for block in written) == full.numel()
        source, size = opened(folder), full.numel()
        assert same(source["w"], full)
        for begin, end in ((0, size), (size // 3, size // 2), (size // 2, size // 2)):
            assert same(source.part("w", begin, end), full.reshape(-1)[begin:end])
        if size:
            offsets, sizes = [n // 2 for n in shape], [n - n // 2 for n in shape]
            assert same(source.block("w", offsets, sizes), full[tuple(slice(begin, None) for begin in offsets)])


@settings(max_examples=25)
@given(shapes, st.integers(1, 6), st.data())
def test_flat_ranges_read_as_any_part_or_block(tmp_path_factory: Any, shape: Shape, world_size: int, data: Any) -> None:
    folder, full = tmp_path_factory.mktemp("flat"), values_of(shape)
    write_flat({"w": full}, folder, world_size)
    source = opened(folder)
    begin = data.draw(st.integers(0, full.numel()))
    end = data.draw(st.integers(begin, full.numel()))
    assert same(source.part("w", begin, end), full.reshape(-1)[begin:end])
    offsets = [data.draw(st.integers(0, n)) for n in shape]
    sizes = [data.draw(st.integers(0, n - first)) for n, first in zip(shape, offsets, strict=True)]
    cut = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
    assert same(source.block("w", offsets, sizes), full[cut])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_files_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": values_of((5, 3), dtype), "scalar": values_of((), dtype), "empty": values_of((0, 2), dtype)}
    write_flat(tensors, tmp_path, 2)
    save_tensors(tensors, tmp_path / "all")
    for source in (opened(tmp_path), TensorFile(tmp_path / "all")):
        assert source.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert source.spec_of(name) == (tuple(tensor.shape), dtype) and same(source[name], tensor)


def test_conjugated_and_negated_views_are_resolved(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "conjugate": number.conj(), "negative": number.conj().imag, "rows": (torch.ones(2, 2) * 1j).conj().T,
        "strided": torch.arange(4.0)[1::4],
    }  # fmt: skip
    save_tensors(tensors, tmp_path / "all")
    write_flat(tensors, tmp_path, 2)
    write_shards({"whole": local_blocks(number.conj(), 0)}, tmp_path, 2, FS)
    source = opened(tmp_path)
    for name, tensor in tensors.items():
        for stored in (source[name], TensorFile(tmp_path / "all")[name]):
            assert torch.equal(stored, tensor.resolve_conj().resolve_neg()), name
        assert change_marker(tensor)[1]
    assert torch.equal(source["whole"], number.conj().resolve_conj())


def test_local_blocks_of_full_and_gathered_tensors() -> None:
    """The first rank writes full tensors, and what must be gathered cannot be written in parts."""
    assert len(local_blocks(torch.ones(3), 0)) == 1 and local_blocks(torch.ones(3), 1) == []
    gathered = Gathered((3,), torch.float32, lambda: torch.ones(3))
    assert not can_shard(gathered) and can_shard(torch.ones(3)) and can_shard(flat_part(torch.ones(3), 0, 1))
    with pytest.raises(ValueError, match="must be gathered"):
        local_blocks(gathered, 0)


def test_host_copy_reuses_the_memory_of_an_earlier_copy() -> None:
    full = values_of((4, 3))
    first = host_copy(full.T, None)
    full += 1
    assert first.flatten().tolist() == (full.T - 1).flatten().tolist()
    assert host_copy(full.T, first).data_ptr() == first.data_ptr() and first[0, 0] == 1
    assert host_copy(full, first).data_ptr() != first.data_ptr()


def test_write_shards_returns_sizes_and_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE", 1 << 10)
    monkeypatch.setattr(files, "_SMALL", 1 << 9)
    big = values_of((70, 50))
    blocks = {"big": local_blocks(big, 0), "turned": local_blocks(big.T, 0), "few": local_blocks(torch.ones(2), 0)}
    blocks |= {f"x{i}": local_blocks(flat_part(big, 3, 2999), 0) for i in range(3)}
    entries = write_shards(blocks, tmp_path, 0, FS)
    assert entries == {file.name: entry_of(file) for file in tmp_path.iterdir()} and len(entries) == 3
    stored = safetensors.torch.load_file(tmp_path / "rank-00000.safetensors")
    assert same(stored["big"], big) and same(stored["turned"], big.T)


def test_write_shards_uses_the_file_system(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    assert write_shards({"w": []}, tmp_path, 1, disk) == {} == write_shards({}, tmp_path, 1, disk)
    write_shards({"w": local_blocks(flat_part(values_of((4, 3)), 1, 8), 0)}, tmp_path, 0, disk)
    names = ["rank-00000.safetensors", "rank-00000.1.safetensors", "rank-00000.2.safetensors"]
    assert disk.operations == [(what, tmp_path / name) for name in names for what in ("write", "sync")]
    with pytest.raises(OSError, match="No space left"):
        write_shards({"w": local_blocks(torch.ones(1 << 20), 0)}, tmp_path, 0, FaultyDisk(tmp_path, 0, fail_once))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.int64, torch.bool, torch.float8_e4m3fn)])
def test_torch_and_omnitrain_read_shards_of_each_other(dtypes: Any, tmp_path: Path) -> None:
    for name in ("shards", "whole", "theirs"):
        (tmp_path / name).mkdir()
    tensors = {f"{dtype}": values_of((5, 4, 3), dtype) for dtype in dtypes} | {"b": values_of((11,), dtypes[0])}
    write_flat(tensors, tmp_path / "shards", 3)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "shards")), no_dist=True)
    results: list[Any] = [target]
    if torch.float32 in dtypes:  # PyTorch consolidates no others
        consolidate_safetensors_files(str(tmp_path / "shards"), str(tmp_path / "whole"), dict.fromkeys(tensors, 1))
        results += map(safetensors.torch.load_file, files_in(tmp_path / "whole"))
        writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
        results.append(opened(tmp_path / "theirs"))
    assert all(same(result[name], tensor) for result in results for name, tensor in tensors.items())


def test_blocks_are_combined(tmp_path: Path) -> None:
    """Without a full shape, or if the same block is in two files."""
    for begins, shape in (((0, 2), {}), ((0, 0, 2), {"shape": (4, 3)})):
        write_rows(values_of((4, 3)), begins, 2, tmp_path, **shape)
        assert same(opened(tmp_path)["w"], values_of((4, 3)))


def test_blocks_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    for name in ("no rank 1", "gap", "two dtypes"):
        (tmp_path / name).mkdir()
    write_flat({"w": values_of((6, 3))}, tmp_path / "no rank 1", 3)
    (tmp_path / "no rank 1" / "rank-00001.safetensors").unlink()
    write_rows(torch.ones(5), (0, 1), 3, tmp_path / "gap", shape=(5,))
    for rank, tensor in enumerate((torch.ones(3), torch.ones(3).half())):
        write_shards({"w": [Block((3 * rank,), tensor, (6,))]}, tmp_path / "two dtypes", rank, FS)
    for name, message in (
        ("no rank 1", r"incomplete: none of its 2 files has 6 of its 18 values of 'w'"),
        ("gap", r"has the block of \(1,\) at \(4,\) of 'w'"), ("two dtypes", "differ in dtype"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            opened(tmp_path / name)["w"]


def test_damaged_files_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_flat({"w": values_of((64, 3))}, tmp_path, 2)
    source, file = opened(tmp_path), tmp_path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="shorter than its header"):
        source.part("w", 100, 192)
    assert same(source.part("w", 0, 96), values_of((64, 3)).view(-1)[:96])
    with pytest.raises(CheckpointError, match="is damaged"):
        opened(tmp_path)
    write_flat({"w": values_of((3, 64))}, tmp_path, 2)
    with pytest.raises(CheckpointError, match="on rank 0 differs"):  # from what it was for the main process
        TensorFile(files_in(tmp_path), None, source.catalogue).part("w", 0, 4)
    for text in (
        "[]", "{", '{"w": []}', '{"w": {}}', '{"w": {"saved_offsets": [-1, 0]}}', '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [0, 1], "shape": [2, 2]}}', '{"w": {"saved_offsets": [0, 0], "shape": 4}}',
    ):  # fmt: skip
        safetensors.torch.save_file({"w": torch.ones(2, 2)}, file, {"DCP_SHARDING_INFO": text})
        with pytest.raises(CheckpointError, match="is damaged"):
            TensorFile(file)
    save_tensors({"w": torch.ones(2)}, file)
    monkeypatch.delitem(tensor_files._BY_NAME, "F32")
    with pytest.raises(CheckpointError, match=r"' has 'w' as F32, and only F64, F16, "):
        TensorFile(file)


def test_ranks_exchange_nothing_about_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    ranks.rank, ranks.world_size = 1, 2  # without another rank, an exchange would have no answer
    for exchange in ("on_main", "sum"):
        monkeypatch.setattr(ranks, exchange, lambda what, *_: pytest.fail(what), raising=True)
    tensors = TensorFile([], ranks)
    assert not tensors and tensors.is_local


@pytest.mark.parametrize(("buffer", "run"), [(1 << 26, 1 << 16), (64, 1 << 16), (1 << 26, 8), (8, 8)])
def test_block_is_the_same_for_any_buffer(buffer: int, run: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_files, "_BUFFER", buffer)
    monkeypatch.setattr(tensor_files, "_MIN_RUN", run)
    full = values_of((4, 5, 6))
    save_tensors({"w": full}, tmp_path / "rank-00000.safetensors")
    source = opened(tmp_path)
    for box in itertools.product(*[[(0, n), (1, n - 1), (1, 2)] for n in full.shape]):
        offsets, sizes = zip(*box, strict=True)
        assert same(source.block("w", offsets, sizes), full[tuple(slice(a, a + n) for a, n in box)])


def test_many_files_are_opened_once_and_not_for_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 60 ranks, of which the last have nothing of one tensor."""
    full = {"even": values_of((120, 2)), "odd": values_of((130, 3)), "few": values_of((40,))}
    write_flat(full, tmp_path, 60)
    files, names, open_file = files_in(tmp_path), list[str](), tensor_files.open_regular
    catalogue = opened(tmp_path).catalogue
    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "read_header", None)
        source = TensorFile(files, None, catalogue)
        assert source.spec_of("odd") == ((130, 3), torch.float32)
    monkeypatch.setattr(tensor_files, "open_regular", lambda path: names.append(path.name) or open_file(path))
    write_full_files(source, tmp_path, 0, 1, FS)
    assert sorted(names) == [file.name for file in files]
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(same(stored[name], tensor) for name, tensor in full.items())


def test_write_full_files_equals_transformers_files(tmp_path: Path) -> None:
    """The files are the same for any number of ranks that write them."""
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(6)} | {"s": torch.tensor(2.0)}
    (tmp_path / "shards").mkdir()
    write_flat(tensors, tmp_path / "shards", 4)
    source, contents = opened(tmp_path / "shards"), []
    for world_size in (1, 3, 10):
        out, entries = tmp_path / f"out{world_size}", dict[str, Any]()
        out.mkdir()
        for rank in range(world_size):
            written = write_full_files(source, out, rank, world_size, FS, limit=100)
            assert bool(written) is (rank < sharded_files.count_full_files(tensors, 100))
            entries |= written
        assert entries == {file.name: entry_of(file) for file in out.iterdir()}
        contents.append(entries)
    assert contents[0] == contents[1] == contents[2]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * (21 * 3 + 1)} and index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        assert same(safetensors.torch.load_file(out / file)[name], tensors[name]) and "-of-00004" in file


@pytest.mark.parametrize("at_once", [50, 64, 1 << 24])
def test_write_full_files_equals_save_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE", at_once)
    tensors = {"w": torch.randn(7, 3), "b": torch.randn(4).bfloat16(), "s": torch.tensor(True), "e": torch.empty(0, 2)}
    write_flat(tensors, tmp_path, 3)
    assert list(write_full_files(opened(tmp_path), tmp_path, 0, 1, FS)) == ["model.safetensors"]
    save_tensors(tensors, tmp_path / "expected")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
