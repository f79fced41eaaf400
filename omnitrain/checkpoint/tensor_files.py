"""Tensor files and sharded tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from omnitrain.checkpoint.disk import write_pieces
from omnitrain.checkpoint.tensor_reader import DTYPES, Spec, TensorFile, dtype_name
from omnitrain.distributed.ranks import Ranks, as_bytes

T = TypeVar("T")
Gather = Callable[[Any], torch.Tensor]
"""Returns a tensor in host memory, in one piece."""


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

    def element_size(self) -> int:
        """Return the bytes per element."""
        return self.dtype.itemsize


# --- sharded tensors


def is_sharded(tensor: Any) -> bool:
    """Return whether gathering this tensor is a collective call."""
    return isinstance(tensor, Gathered) or hasattr(tensor, "full_tensor")


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


def read_local(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a full tensor; without communication, if every rank can read the files."""
    if not is_local(tensors):
        return tensors[name]
    shape, _ = spec_of(tensors, name)
    return read_range(tensors, name, 0, math.prod(shape)).reshape(shape)


def read_range(tensors: Any, name: str, begin: int, end: int) -> torch.Tensor:
    """Return the values [begin, end) of a flattened tensor, 1-D, of files that every rank can read."""
    return tensors.part(name, begin, end)


def is_local(tensors: Any) -> bool:
    """Return whether every rank can read parts of these tensors without communication."""
    return bool(getattr(tensors, "is_local", False))


def read_like(tensors: Any, name: str, present: Any) -> torch.Tensor:
    """Return this rank's part of a saved tensor, sharded like `present`; all of it if that is not sharded.

    If every rank can read the files, only that part is read, without communication.
    """
    shape, _ = spec_of(tensors, name)
    if not is_local(tensors) or not hasattr(present, "full_tensor") or shape != tuple(present.shape):
        return shard_like(read_local(tensors, name), present)
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(placement) not in (Shard, Replicate) for placement in present.placements):
        # a strided shard is not a rectangle
        return shard_like(read_local(tensors, name), present)
    mesh, placements = present.device_mesh, present.placements
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    block = tensors.block(name, tuple(offsets), tuple(sizes)).to(present.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(block, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def write_on_main(ranks: Ranks, files: Sequence[Mapping[str, Any]], write: Callable[[Gather], T]) -> T:
    """Return the result of `write` on the main process, while the others contribute their parts of the tensors.

    Args:
        ranks: The ranks that have the tensors.
        files: All tensors that `write` gathers with the function it gets, in the order of the files.
        write: Writes them. Its error is raised on all ranks.
    """
    parts = [tensor for tensors in files for _, tensor in _in_file_order(tensors) if is_sharded(tensor)]
    gathered, is_gathering = 0, False

    def gather(tensor: Any) -> torch.Tensor:
        nonlocal gathered, is_gathering
        gathered += is_sharded(tensor)
        is_gathering = is_sharded(tensor)
        result = gather_to_host(tensor)
        is_gathering = False
        return result

    def work() -> T:
        if failure is not None:
            raise failure
        return result

    result: Any = None
    failure: Exception | None = None
    if ranks.is_main:
        try:
            result = write(gather)
        except Exception as error:
            if is_gathering:
                raise  # the other ranks are inside a collective call, and cannot be notified
            failure = error
    for tensor in parts[gathered:]:
        gather_to_host(tensor)
    return ranks.on_main("the writing of a checkpoint or model", work)


# --- files


def host_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors in host memory, copied only if needed."""
    return {name: gather_to_host(tensor) for name, tensor in tensors.items()}


def host_copy(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Return a copy in host memory, written into `buffer`, an earlier copy, if it fits.

    With newly allocated memory, most of the time is spent on clearing each page at its first write.
    """
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return buffer.copy_(tensor.detach())


def save_tensors(tensors: Mapping[str, Any], path: Path, hasher: Any = None, gather: Gather = gather_to_host) -> None:
    """Write tensors to one safetensors file; views of the same memory become separate tensors.

    Args:
        tensors: Tensors by name. Sharded ones are gathered one at a time.
        path: The file.
        hasher: From `hashlib`; updated with what is written.
        gather: Gathers a tensor.
    """

    def content() -> Iterator[bytes | memoryview]:
        for piece in _pieces(tensors, gather):
            yield piece
            if hasher is not None:
                hasher.update(piece)

    write_pieces(path, content())


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of the file that `save_tensors` writes."""
    hasher = hashlib.sha256()
    for piece in _pieces(tensors, gather_to_host):
        hasher.update(piece)
    return hasher.hexdigest()


def fingerprints(tensors: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
    """Return a digest of each tensor's values and shape, on all ranks; only the main one hashes.

    16-bit floats are converted to 32 bits, as some backends store them so.

    Args:
        tensors: Tensors by name. Sharded ones are gathered one at a time.
        ranks: The ranks that have the tensors.
    """

    def take(gather: Gather) -> dict[str, str]:
        digests: dict[str, Future[str]] = {}
        waiting: deque[Future[str]] = deque()
        with ThreadPoolExecutor(_HASHERS, thread_name_prefix="omnitrain-hash") as pool:
            for name, tensor in _in_file_order(tensors):
                if len(waiting) > _HASHERS:  # limits how many are copied to the host at once
                    waiting.popleft().result()
                digests[name] = pool.submit(_fingerprint, gather(tensor))
                waiting.append(digests[name])
        return {name: digest.result() for name, digest in sorted(digests.items())}

    return write_on_main(ranks, [tensors], take)


_HASHERS = 4


def _fingerprint(tensor: torch.Tensor) -> str:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    hasher = hashlib.sha256(f"{DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}".encode())
    hasher.update(as_bytes(tensor).numpy().data)
    return hasher.hexdigest()[:16]


def _in_file_order(tensors: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, tensors[name]) for name in file_order({name: spec_of(tensors, name) for name in tensors})]


def _pieces(tensors: Mapping[str, Any], gather: Gather) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: its header, and the memory of each tensor."""
    # the writer of the safetensors package needs all tensors at once, and returns no hash
    yield encode_header({name: spec_of(tensors, name) for name in tensors})
    for _, tensor in _in_file_order(tensors):
        yield as_bytes(gather(tensor)).numpy().data


def encode_header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the start of a safetensors file, up to its tensors, which follow in the order of `file_order`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers requires the format
    end = 0
    for name in file_order(specs):
        shape, dtype = specs[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_order(specs: Mapping[str, Spec]) -> list[str]:
    """Return the names of tensors in the order of a file."""
    # the widest dtypes first, so that each tensor starts at a multiple of its element size
    return sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file into host memory, not memory-mapped: the file may be changed."""
    return dict(TensorFile(path))


def spec_of(tensors: Mapping[str, Any], name: str) -> Spec:
    """Return shape and dtype of a tensor, without reading it if it is in a file."""
    if isinstance(tensors, TensorFile):
        return tensors.spec_of(name)
    return tuple(tensors[name].shape), tensors[name].dtype
