"""Optimizer state for other parameter groups, chosen from files without reading them."""

from __future__ import annotations

from pathlib import Path

import torch

from omnitrain.checkpoint.param_group_changes import regroup_state
from omnitrain.checkpoint.tensor_files import is_local, save_tensors, spec_of
from omnitrain.checkpoint.tensor_reader import TensorFile


def test_regrouped_state_is_read_on_access(tmp_path: Path) -> None:
    path, names = tmp_path / "state", ["first/exp_avg", "last/exp_avg", "count", "left"]
    save_tensors({name: torch.full((4,), float(at)) for at, name in enumerate(names)}, path)
    source, data = TensorFile(path), path.read_bytes()
    path.write_bytes(b"")  # nothing can be read
    saved = {"groups": [{"lr": 0.1, "params": ["first", "last"]}], "rest": {}, "shared": {"__tensor__": "count"}}
    groups = [(["last"], {"lr": 1.0}), (["new"], {"lr": 1.0})]
    rest, tensors = regroup_state(saved, source, groups, "here")
    assert [group["params"] for group in rest["groups"]] == [["last"], ["new"]]
    assert sorted(tensors) == ["count", "last/exp_avg"] and len(tensors) == 2 and "first/exp_avg" not in tensors
    assert spec_of(tensors, "last/exp_avg") == ((4,), torch.float32) and is_local(tensors)
    path.write_bytes(data)
    assert torch.equal(tensors["last/exp_avg"], torch.ones(4))
    assert torch.equal(tensors.part("last/exp_avg", 1, 3), torch.ones(2))
    assert sorted(source) == sorted(names)
