"""What a stock `transformers.Trainer` resumes from, written beside our own files of a checkpoint.

Of all this we read the history in `trainer_state.json` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnitrain.checkpoint.state import WEIGHTS, bare_name, from_json, is_in_parts, load_tensors, save_tensors, unwrap
from omnitrain.errors import ConfigError
from omnitrain.trainers.saving import OPTIMIZER

if TYPE_CHECKING:
    from omnitrain.hf.engine import Engine, Schedule
    from omnitrain.hf.trainer import HFTrainer

__all__ = ["adapters_of", "write_adapters", "write_model_files", "write_optimizer", "write_state"]


def write_optimizer(engine: Engine, schedule: Schedule, folder: Path) -> None:
    """Write the states of optimizer and schedule.

    Weights in parts have been put together in the checkpoint's own file, and are read from there: all of the state is
    in the main process's memory for a moment, as with a stock Trainer.
    """
    optimizer, steps = _optimizer_state(engine, folder), schedule.state_dict()
    if len(optimizer["param_groups"]) > len(engine.owner.optimizer.param_groups):
        lists = ("base_lrs", "_last_lr", "lr_lambdas")  # an entry for each group
        steps |= {name: 2 * list(steps[name]) for name in lists if name in steps}
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save(steps, folder / "scheduler.pt")


def _optimizer_state(engine: Engine, folder: Path) -> dict[str, Any]:
    """Return the optimizer's state by number, as a stock Trainer has it: in its two groups, if ours is in one."""
    owner = engine.owner
    tensors, content = owner._optimizer_state()
    if any(map(is_in_parts, tensors.values())):
        tensors = load_tensors(folder / OPTIMIZER)
    state: dict[str, dict[str, Any]] = {name: from_json(rest) for name, rest in content["rest"].items()}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        state.setdefault(name, {})[entry] = tensor
    groups = [{key: from_json(value) for key, value in group.items()} for group in content["groups"]]
    if owner._given["optimizer"] is None and len(groups) == 1:
        model, held = unwrap(owner.model), set(groups[0]["params"])
        decaying = set(map(bare_name, engine.get_decay_parameter_names(model)))  # type: ignore[arg-type]
        names = [name for name in (bare_name(name) for name, _ in model.named_parameters()) if name in held]
        halves = [name for name in names if name in decaying], [name for name in names if name not in decaying]
        groups = [{**groups[0], "params": half} for half in halves]
    number = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {number[name]: entries for name, entries in state.items() if name in number},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }


def write_state(engine: Engine, folder: Path) -> None:
    """Write transformers' history, and what its callbacks keep."""
    owner = engine.owner
    if engine.state.global_step != owner.progress.step + owner.progress.skipped_steps:
        engine.state = owner._engine_state()  # their loop has yet to begin
    held: dict[str, Any] = {}
    for one in [*engine._stateful_callbacks(), engine.control]:
        held.setdefault(type(one).__name__, []).append(one.state())
    vars(engine.state)["stateful_callbacks"] = held
    own_name = f"checkpoint-{owner.progress.step:06d}"
    best = own_name if owner._has_uncredited_best else owner.metrics.get("best_checkpoint")
    engine.state.best_model_checkpoint = best and str(owner.store.root / best)  # type: ignore[union-attr]
    engine.state.save_to_json(str(folder / "trainer_state.json"))
    with engine.showing_arguments() as shown:
        torch.save(shown, folder / "training_args.bin")


def write_model_files(engine: Engine, folder: Path) -> None:
    """Write the tokenizer or processor, and adapters of PEFT."""
    owner = engine.owner
    if engine.processing_class is not None:
        engine.processing_class.save_pretrained(str(folder))
    if hasattr(unwrap(owner.model), "peft_config"):
        adapters = adapters_of(owner)
        if any(map(is_in_parts, adapters.values())):
            written = load_tensors(folder / WEIGHTS)
            adapters = {name: written[name] for name in adapters}
        write_adapters(owner.model, folder, adapters, overwrite=True)


def adapters_of(trainer: HFTrainer) -> dict[str, Any]:
    """Return the tensors of PEFT's adapters, and what else is trained, by name; those in parts as they are."""
    model: Any = unwrap(trainer.model)
    trained = {bare_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    marks = [f".{name}." for name in model.peft_config]
    tensors = trainer._model_tensors().items()
    return {name: one for name, one in tensors if name in trained or any(mark in name for mark in marks)}


def write_adapters(model: Any, folder: Path, tensors: Mapping[str, torch.Tensor], overwrite: bool) -> None:
    """Write adapters in PEFT's own form.

    Raises:
        ConfigError: If there are some already.
    """
    if (folder / "adapter_config.json").exists() and not overwrite:
        raise ConfigError(
            f"{str(folder)!r} holds adapters already. Pass overwrite=True to replace them, or give another path."
        )
    model = unwrap(model)
    # PEFT looks for its tensors under the names of the wrapped modules
    wrapped = {bare_name(name): name for name, _ in model.named_parameters()}
    model.save_pretrained(folder, state_dict={wrapped.get(name, name): one for name, one in tensors.items()})
    for adapter in model.peft_config if any(name != bare for bare, name in wrapped.items()) else ():
        file = (folder if adapter == "default" else folder / adapter) / "adapter_model.safetensors"
        written = {bare_name(name).replace(f".{adapter}.", "."): one for name, one in load_tensors(file).items()}
        save_tensors({name: one.clone() for name, one in written.items()}, file)  # they are views of the file
