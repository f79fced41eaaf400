"""Shards that two processes write of DTensors are read in parts by each of them, or whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forking import Case, play


def whole_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"rows": torch.randn(5, 4), "columns": torch.randn(3, 5), "one": torch.randn(1, 3), "same": torch.randn(4)}


def write_and_read(folder: str, missing: bool = False) -> dict[str, Any]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from omnitrain.checkpoint.disk import FileSystem
    from omnitrain.checkpoint.shards import own_blocks, write_shards
    from omnitrain.checkpoint.tensors import TensorFile
    from omnitrain.distributed import ProcessRanks

    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), Path(folder)
    mesh = init_device_mesh("cpu", (2,))
    wholes, kinds = whole_tensors(), {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "same": Replicate()}
    placed = {name: distribute_tensor(one, mesh, [kinds[name]]) for name, one in wholes.items()}
    blocks = {name: own_blocks(one, rank) for name, one in placed.items()}
    entries = write_shards(blocks, place, rank, FileSystem())
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    ranks = ProcessRanks(store, rank, 2)
    files = sorted(place.glob("*.safetensors"))
    if missing and rank == 1:  # as on a disk that only the main process has
        files = [file.with_name(f"absent-{file.name}") for file in files]
    source = TensorFile(files, ranks)
    found: dict[str, Any] = {"files": sorted(entries), "is_local": source.is_local}
    found["whole"] = all(torch.equal(source[name], one) for name, one in wholes.items())
    if source.is_local:
        half = slice(10 * rank, 10 * rank + 10)
        found["part"] = torch.equal(source.part("rows", half.start, half.stop), wholes["rows"].view(-1)[half])
        found["block"] = torch.equal(source.block("columns", (0, 1), (3, 3)), wholes["columns"][:, 1:4])
        target = {name: torch.zeros_like(one) for name, one in placed.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(target, storage_reader=HuggingFaceStorageReader(folder))
        found["torch"] = all(torch.equal(one.full_tensor(), wholes[name]) for name, one in target.items())
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cases = []
    for missing in (False, True):
        folder = tmp_path_factory.mktemp("shards")
        cases.append(Case(f"{missing}", "test_shards:write_and_read", {"folder": str(folder), "missing": missing}))
    return play(cases, tmp_path_factory.mktemp("cases"))


def test_two_ranks_write_their_blocks_and_read_any(outcomes: Any) -> None:
    for rank, outcome in enumerate(outcomes["False"]):
        assert outcome.code == 0, outcome.output
        assert outcome.result.pop("files") == [f"rank-0000{rank}.safetensors"]
        assert outcome.result == dict.fromkeys(("is_local", "whole", "part", "block", "torch"), True)


def test_files_that_only_the_main_rank_sees_are_read_by_it_for_all(outcomes: Any) -> None:
    for outcome in outcomes["True"]:
        assert outcome.code == 0, outcome.output
        assert outcome.result["is_local"] is False and outcome.result["whole"] is True
