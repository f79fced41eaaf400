"""Shards of DTensors that two processes write, read in parts or in full."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forking import Case, play
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.shards import own_blocks, write_shards
from omnitrain.checkpoint.tensors import TensorFile
from omnitrain.distributed import ProcessRanks


def write_and_read(folder: str, missing: bool = False) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, path, mesh = dist.get_rank(), Path(folder), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    full = {"rows": torch.randn(5, 4), "columns": torch.randn(3, 5), "one": torch.randn(1, 3), "same": torch.randn(4)}
    placements = {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "same": Replicate()}
    sharded = {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in full.items()}
    entries = write_shards({name: own_blocks(one, rank) for name, one in sharded.items()}, path, rank, FileSystem())
    dist.barrier()
    files = sorted(path.glob("*.safetensors"))
    if missing and rank == 1:  # as on a disk that only the main process has
        files = [file.with_name(f"absent-{file.name}") for file in files]
    source = TensorFile(files, ProcessRanks(dist.distributed_c10d._get_default_store(), rank, 2))
    result: dict[str, Any] = {"files": sorted(entries), "is_local": source.is_local}
    result["full"] = all(torch.equal(source[name], tensor) for name, tensor in full.items())
    if source.is_local:
        start = 10 * rank
        part = full["rows"].flatten()[start : start + 10]
        result["part"] = torch.equal(source.part("rows", start, start + 10), part)
        result["block"] = torch.equal(source.block("columns", (0, 1), (3, 3)), full["columns"][:, 1:4])
        target = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(target, storage_reader=HuggingFaceStorageReader(folder))
        result["torch"] = all(torch.equal(tensor.full_tensor(), full[name]) for name, tensor in target.items())
    dist.barrier()
    return result


@pytest.mark.parametrize("missing", [False, True], ids=["shared disk", "main rank's disk"])
def test_shards_of_two_ranks_are_read_in_parts_or_by_main_rank(missing: bool, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    case = Case("read", "test_shards:write_and_read", {"folder": str(tmp_path / "shards"), "missing": missing})
    for rank, outcome in enumerate(play([case], tmp_path / "cases")["read"]):
        assert outcome.code == 0, outcome.output
        assert outcome.result.pop("files") == [f"rank-0000{rank}.safetensors"]
        local = {} if missing else dict.fromkeys(("part", "block", "torch"), True)
        assert outcome.result == {"is_local": not missing, "full": True, **local}
