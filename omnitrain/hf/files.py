"""transformers' files in checkpoints and model folders.

A stock Trainer can resume from them. We read only the history in `trainer_state.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from omnitrain.arguments import check_switch
from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.contents import OPTIMIZER
from omnitrain.checkpoint.safetensors_header import find_tensor_files
from omnitrain.checkpoint.state_dicts import bare_name, from_json, unwrap
from omnitrain.checkpoint.tensor_files import TensorFile, is_sharded
from omnitrain.core.errors import ConfigError


def check_stock_checkpoints(stock_checkpoints: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError if `stock_checkpoints` is not True or False, or if the other arguments exclude it."""
    check_switch("stock_checkpoints", stock_checkpoints)
    if stock_checkpoints and kwargs.get("save_dir") is None:
        raise ConfigError("`stock_checkpoints=True` needs a folder for checkpoints. Pass `save_dir`, or leave it out.")
    for name, reason in (
        ("save_only_model", "whose checkpoints nobody can resume from"),
        ("async_save", "as the files of transformers are written at once"),
    ):
        if stock_checkpoints and kwargs.get(name):
            raise ConfigError(f"`stock_checkpoints=True` contradicts `{name}=True`, {reason}. Leave one of them out.")


def write_optimizer(backend: Backend, decaying: Collection[str] | None, steps: Mapping[str, Any], folder: Path) -> None:
    """Write the states of optimizer and schedule (`steps`) into a checkpoint.

    A stock Trainer has the parameters with weight decay (`decaying`) in a separate group; None leaves the groups
    unchanged. Sharded state is read from the checkpoint's own file: the main process briefly holds all of it, as with a
    stock Trainer.
    """
    optimizer = _optimizer_state(backend, decaying, folder)
    if len(optimizer["param_groups"]) > len(backend.optimizer.param_groups):
        lists = ("base_lrs", "_last_lr", "lr_lambdas")  # one entry per group
        steps = {**steps, **{name: 2 * list(steps[name]) for name in lists if name in steps}}
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save(steps, folder / "scheduler.pt")


def _optimizer_state(backend: Backend, decaying: Collection[str] | None, folder: Path) -> dict[str, Any]:
    """Return the optimizer's state by index as in a stock Trainer, whose two groups replace a single one of ours."""
    tensors, content = backend.optimizer_state()
    if any(map(is_sharded, tensors.values())):
        files = {path.relative_to(folder).as_posix(): None for path in folder.rglob("*.safetensors")}
        tensors = dict(TensorFile(find_tensor_files(folder, files, OPTIMIZER)))
    state: dict[str, dict[str, Any]] = {name: from_json(entries) for name, entries in content["rest"].items()}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        state.setdefault(name, {})[entry] = tensor
    groups = [{key: from_json(value) for key, value in group.items()} for group in content["groups"]]
    if decaying is not None and len(groups) == 1:
        trained, bare_decaying = set(groups[0]["params"]), set(map(bare_name, decaying))
        model = unwrap(backend.model)
        names = [name for name in (bare_name(name) for name, _ in model.named_parameters()) if name in trained]
        halves = ([n for n in names if n in bare_decaying], [n for n in names if n not in bare_decaying])
        groups = [{**groups[0], "params": half} for half in halves]
    number = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {number[name]: entries for name, entries in state.items() if name in number},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }


def write_state(
    state: transformers.TrainerState, stateful: Iterable[Any], args: transformers.TrainingArguments | None, folder: Path
) -> None:
    """Write transformers' history with the states of its callbacks, and the training arguments, into a checkpoint."""
    states: dict[str, Any] = {}
    for callback in stateful:
        states.setdefault(type(callback).__name__, []).append(callback.state())
    vars(state)["stateful_callbacks"] = states
    state.save_to_json(str(folder / "trainer_state.json"))
    if args is not None:
        torch.save(args, folder / "training_args.bin")
