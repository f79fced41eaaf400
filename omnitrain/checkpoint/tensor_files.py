"""Tensor files and sharded tensors."""

from __future__ import annotations

import hashlib
import json
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch

from omnitrain.checkpoint.tensor_reader import DTYPES, Spec, TensorFile, rows_at_once, size_of, unsaved_dtype
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import create_file
from omnitrain.distributed.ranks import Ranks, as_bytes

T = TypeVar("T")
Gather = Callable[[Any], torch.Tensor]
"""Returns a tensor in host memory, in one piece."""

_HASHERS = 4


@dataclass(slots=True)
class Gathered:
    """A sharded tensor that is gathered only when it is read, by a collective call.

    Attributes:
        shape: The shape of the full tensor.
        dtype: The dtype of the full tensor.
        read: Returns the full tensor in host memory; a collective call.
        local: Returns this rank's part, if possible.
        flat: Returns, without communication, the contiguous range of the flattened tensor that this rank writes: its
            first index, and its values, 1-D, on any device (empty if there are none). The ranges of all ranks are
            disjoint and cover the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    local: Callable[[], torch.Tensor] | None = None
    flat: Callable[[], tuple[int, torch.Tensor]] | None = None

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return size_of((self.shape, self.dtype))


# --- sharded tensors


class Block(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        offsets: The index in the full tensor at which it starts.
        tensor: Its values, contiguous or not, on any device.
        shape: The shape of the full tensor.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...]


def is_sharded(tensor: Any) -> bool:
    """Return whether gathering this tensor is a collective call."""
    return isinstance(tensor, Gathered) or hasattr(tensor, "full_tensor")


def total_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors, the full ones of those that are sharded."""
    return sum(map(operator.attrgetter("nbytes"), tensors.values()))


def gather_to_host(tensor: Any) -> torch.Tensor:
    """Return the full tensor in host memory; for a sharded one, a collective call."""
    if isinstance(tensor, Gathered):
        return tensor.read().contiguous()
    tensor = tensor.detach()
    full = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full.cpu().resolve_conj().resolve_neg().contiguous()


def change_marker(tensor: Any) -> tuple[int, bytes]:
    """Return a marker that changes when this rank's part of a tensor is written to, without reading all of it.

    PyTorch counts in-place writes, but not those through `.data`, which code for averaged weights often uses. Such code
    changes all values, so the marker includes a few of them.
    """
    if isinstance(tensor, Gathered):
        if tensor.local is None:
            return 0, b""
        tensor = tensor.local()
    part = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
    sample = part.reshape(-1)[:: max(1, part.numel() // 16)]
    return part._version, as_bytes(sample.cpu().resolve_conj().resolve_neg().contiguous()).numpy().tobytes()


def shard_like(tensor: torch.Tensor, present: Any) -> torch.Tensor:
    """Return this rank's part of a full tensor, sharded like `present`; all of it if that is not sharded."""
    if not hasattr(present, "full_tensor") or hasattr(tensor, "full_tensor") or tensor.shape != present.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    device = present.to_local().device
    part = distribute_tensor(tensor.to(device), present.device_mesh, present.placements, src_data_rank=None)
    return part.clone()  # a view would keep the full tensor in memory


def is_local(tensors: Any) -> TypeGuard[TensorFile]:
    """Return whether every rank can read parts of these tensors without communication."""
    return isinstance(tensors, TensorFile) and tensors.is_local


def read_part(tensors: Mapping[str, torch.Tensor], name: str, present: Any = None) -> torch.Tensor:
    """Return this rank's part of a saved tensor, sharded like `present`; all of it if that is not sharded.

    If every rank can read the files, only that part is read, without communication.
    """
    if not is_local(tensors):
        return shard_like(tensors[name], present)
    shape, dtype = tensors.spec_of(name)
    if not hasattr(present, "full_tensor") or shape != tuple(present.shape):
        return tensors.read_tensors([name])[name]
    from torch.distributed.tensor import DTensor

    local = torch.empty(present.to_local().shape, dtype=dtype)
    for block in dtensor_blocks(present, local):
        tensors.read_into(name, block.offsets, block.tensor)
    local, stride = local.to(present.to_local().device), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, present.device_mesh, present.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def dtensor_blocks(tensor: Any, local: torch.Tensor) -> list[Block]:
    """Return the blocks of a DTensor on this rank, as parts of `local`, which has the shape of its local part."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    placements = list(zip(tensor.placements, mesh.get_coordinate() or (), mesh.shape, strict=False))
    blocks = [Block((), local, shape)]
    for axis, size in enumerate(shape):  # more than one run only if a dimension is sharded with strides
        blocks = [
            Block((*block.offsets, begin), block.tensor.narrow(axis, first, length), shape)
            for block in blocks
            for begin, first, length in _local_runs(axis, size, placements)
        ]
    return blocks


def _local_runs(axis: int, size: int, placements: Sequence[tuple[Any, int, int]]) -> list[tuple[int, int, int]]:
    """Return the runs of a dimension on this rank: index in the full tensor, index in the local one, length."""
    indices: Any = range(size)
    for placement, index, parts in placements:  # `distribute_tensor` splits by the first dimension of the mesh first
        if getattr(placement, "dim", None) != axis:
            continue
        if hasattr(placement, "split_factor"):  # a strided shard: a part of each of several parts
            shard = type(placement)(0, split_factor=placement.split_factor)
            indices = shard._split_tensor(torch.tensor(indices), parts, with_padding=False)[0][index].tolist()
        else:
            # as torch.chunk: the first ranks get the larger parts, the last ones possibly none
            most = -(-len(indices) // parts)
            indices = indices[most * index : most * (index + 1)]
    if isinstance(indices, range):
        return [(indices.start, 0, len(indices))] if indices else []
    firsts = [position for position, index in enumerate(indices) if not position or index != indices[position - 1] + 1]
    ends = [*firsts[1:], len(indices)]
    return [(indices[first], first, end - first) for first, end in zip(firsts, ends, strict=False)]


def write_on_main(ranks: Ranks, files: Sequence[Mapping[str, Any]], write: Callable[[Gather], T]) -> T:
    """Return the result of `write` on the main process, while the others contribute their parts of the tensors.

    Args:
        ranks: The ranks that have the tensors.
        files: All tensors that `write` gathers with the function it gets, in the order of the files.
        write: Writes them. Its error is raised on all ranks.
    """
    parts = iter([tensors[name] for tensors in files for name in file_order(tensors) if is_sharded(tensors[name])])
    is_gathering = False

    def gather(tensor: Any) -> torch.Tensor:
        nonlocal is_gathering
        if not is_sharded(tensor):
            return gather_to_host(tensor)
        next(parts)
        is_gathering = True
        full = gather_to_host(tensor)
        is_gathering = False
        return full

    outcome: Future[T] = Future()
    if ranks.is_main:
        try:
            outcome.set_result(write(gather))
        except Exception as error:
            if is_gathering:
                raise  # the other ranks are inside a collective call, and cannot be notified
            outcome.set_exception(error)
    for tensor in parts:
        gather_to_host(tensor)
    return ranks.on_main("the writing of a checkpoint or model", outcome.result)


# --- files


def host_copy(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Return a copy in host memory, written into `buffer`, an earlier copy, if it fits.

    With newly allocated memory, most of the time is spent on clearing each page at its first write.
    """
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return buffer.copy_(tensor.detach())


def save_tensors(tensors: Mapping[str, Any], path: Path, gather: Gather = gather_to_host) -> None:
    """Write tensors to one safetensors file; views of the same memory become separate tensors.

    Sharded tensors are gathered one at a time; those in files are read a piece at a time.
    """
    with create_file(path) as file:
        file.writelines(file_content(tensors, gather))


def file_content(
    tensors: Mapping[str, Any], gather: Gather = gather_to_host, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: its header, and the memory of each tensor.

    Raises:
        CheckpointError: If safetensors files cannot hold a dtype.
    """
    # the writer of the safetensors package needs all tensors at once, and returns no hash
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers requires the format
    names, end = file_order(tensors), 0
    for name in names:
        shape, dtype = spec_of(tensors, name)
        if dtype not in DTYPES:
            raise CheckpointError(unsaved_dtype(name, dtype))
        begin, end = end, end + size_of((shape, dtype))
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in tensors.pieces(names) if isinstance(tensors, TensorFile) else _host_pieces(tensors, names, gather):
        yield as_bytes(piece).numpy().data


def _host_pieces(tensors: Mapping[str, Any], names: Sequence[str], gather: Gather) -> Iterator[torch.Tensor]:
    """Yield tensors in pieces in host memory; of one that is elsewhere, one piece at a time is copied."""
    for name in names:
        tensor = gather(tensors[name]) if is_sharded(tensors[name]) else tensors[name].detach()
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_cpu and tensor.is_contiguous():
            tensor = tensor.as_strided((tensor.numel(),), (1,))
        for piece in tensor.split(rows_at_once(tensor.shape, tensor.dtype)) if tensor.dim() else (tensor,):
            yield piece.cpu().contiguous()


def file_order(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors in the order of a file."""
    # the widest dtypes first, so that each tensor starts at a multiple of its element size
    return sorted(tensors, key=lambda name: (-spec_of(tensors, name)[1].itemsize, name))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file into host memory, not memory-mapped: the file may be changed."""
    tensors = TensorFile(path)
    return tensors.read_tensors(list(tensors))


def spec_of(tensors: Mapping[str, Any], name: str) -> Spec:
    """Return shape and dtype of a tensor, without reading it if it is in a file."""
    if isinstance(tensors, TensorFile):
        return tensors.spec_of(name)
    return tuple(tensors[name].shape), tensors[name].dtype


# --- fingerprints


def fingerprints(tensors: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
    """Return a digest of each tensor's values and shape, on all ranks; only the main one hashes.

    16-bit floats are converted to 32 bits, as some backends store them so. Sharded tensors are gathered one at a time.
    """

    def take(gather: Gather) -> dict[str, str]:
        digests: dict[str, Future[str]] = {}
        waiting: deque[Future[str]] = deque()
        with ThreadPoolExecutor(_HASHERS, thread_name_prefix="omnitrain-hash") as pool:
            for name in file_order(tensors):
                if len(waiting) > _HASHERS:  # limits how many are copied to the host at once
                    waiting.popleft().result()
                digests[name] = pool.submit(_fingerprint, gather(tensors[name]))
                waiting.append(digests[name])
        return {name: digest.result() for name, digest in sorted(digests.items())}

    return write_on_main(ranks, [tensors], take)


def _fingerprint(tensor: torch.Tensor) -> str:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    hasher = hashlib.sha256(f"{DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}".encode())
    hasher.update(as_bytes(tensor).numpy().data)
    return hasher.hexdigest()[:16]
