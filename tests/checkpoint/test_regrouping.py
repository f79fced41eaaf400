"""The optimizer's state for other groups is chosen from the files without being read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omnitrain.checkpoint.reading import TensorFile
from omnitrain.checkpoint.regrouping import regrouped
from omnitrain.checkpoint.tensors import is_local, save_tensors, spec_of


def test_state_that_is_kept_is_read_only_where_it_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["first/exp_avg", "last/exp_avg", "count", "left"]
    save_tensors({name: torch.full((4,), float(at)) for at, name in enumerate(names)}, tmp_path / "state")
    read: list[str] = []
    fill = TensorFile._fill

    def noted(self: TensorFile, name: str, box: Any, target: torch.Tensor) -> None:
        read.append(name)
        fill(self, name, box, target)

    monkeypatch.setattr(TensorFile, "_fill", noted)
    source = TensorFile(tmp_path / "state")
    saved = {"groups": [{"lr": 0.1, "params": ["first", "last"]}], "rest": {}, "shared": {"__tensor__": "count"}}
    groups = [(["last"], {"lr": 1.0}), (["new"], {"lr": 1.0})]
    rest, kept = regrouped(saved, source, groups, "here")
    assert [group["params"] for group in rest["groups"]] == [["last"], ["new"]]
    assert sorted(kept) == ["count", "last/exp_avg"] and len(kept) == 2 and "first/exp_avg" not in kept
    assert spec_of(kept, "last/exp_avg") == ((4,), torch.float32) and is_local(kept)
    assert read == []
    assert torch.equal(kept["last/exp_avg"], torch.ones(4))
    assert torch.equal(kept.part("last/exp_avg", 1, 3), torch.ones(2))
    assert read == ["last/exp_avg"] * 2
    assert sorted(source) == sorted(names)
