"""DeepSpeed ZeRO: what it is told, and its engine, which runs backward, clips and steps by itself.

Its tensors lie cut up in buffers of its own. They are read and written by parameter, so that a checkpoint holds what
any other backend would have written.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.state import (
    IMPLEMENTATION,
    bare_name,
    check_fit,
    check_groups,
    from_json,
    like,
    to_json,
    unwrap,
)
from omnitrain.checkpoint.tensors import Gathered, shape_of
from omnitrain.errors import ConfigError, MissingExtraError
from omnitrain.precision import choose_device

__all__ = ["ZeroEngine", "adopt_config", "deepspeed_plugin", "fill_config", "schedule_of"]


def deepspeed_plugin(config: str | Path | Mapping[str, Any] | None) -> Any:
    """Return accelerate's plugin for a DeepSpeed configuration, or for what the launcher said; None without either.

    Args:
        config: A path, a dict (`{}` is ZeRO 2 with its defaults), or None for the launcher's.

    Raises:
        ConfigError: If the file cannot be read.
    """
    from_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if config is None and not from_launcher:
        return None
    if choose_device(None).type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks at it when it is imported
    try:
        import deepspeed  # noqa: F401
        from accelerate.utils import DeepSpeedPlugin
    except ImportError:
        raise MissingExtraError("deepspeed_config", "deepspeed", "deepspeed") from None
    if config is None:
        return DeepSpeedPlugin()
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"`deepspeed_config={str(config)!r}` cannot be read: {error}.") from error
    content = json.loads(json.dumps(config))  # a copy, which DeepSpeed may write into
    content.setdefault("zero_optimization", {"stage": 2})
    return DeepSpeedPlugin(hf_ds_config=content)


def adopt_config(plugin: Any, given: dict[str, Any]) -> None:
    """Bring the DeepSpeed configuration and the trainer's arguments to one word.

    What only the configuration says becomes the trainer's argument; where both speak they must say the same.

    Args:
        plugin: accelerate's, with the configuration.
        given: The keyword arguments that the user gave; filled.

    Raises:
        ConfigError: If they contradict each other; both values are named.
    """
    config = plugin.deepspeed_config
    if "scheduler" in config:
        raise ConfigError(
            "The DeepSpeed configuration has a 'scheduler', but the schedule is stepped by the trainer, so that it is "
            "the same everywhere. Remove it and pass `lr_scheduler` and `warmup_steps`."
        )
    if "optimizer" in config and given.get("optimizer") is not None:
        raise ConfigError(
            f"The DeepSpeed configuration has the optimizer {config['optimizer'].get('type')!r}, and "
            f"`optimizer={given['optimizer']!r}` is passed too. Leave one of them out."
        )
    names = {
        "train_micro_batch_size_per_gpu": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "train_batch_size": "global_batch_size",
    }
    for key, name in names.items():
        says = config.get(key, "auto")
        if says == "auto" or (key == "gradient_accumulation_steps" and says == 1):
            continue  # accelerate writes a 1 where nothing was said
        wanted = given.get(name, says)
        wanted = 0.0 if wanted is None and key == "gradient_clipping" else wanted
        if wanted is not None and wanted != says:
            raise ConfigError(
                f"The DeepSpeed configuration says {key}={says}, and the argument `{name}` {given.get(name)}. "
                f"Give both the same value, or say 'auto' in the configuration."
            )
        given[name] = says if says or key != "gradient_clipping" else None
    for precision in ("fp16", "bf16"):
        says = config.get(precision, {}).get("enabled", "auto")
        asked = given.get("autocast")
        if says is True and asked not in (None, precision):
            raise ConfigError(
                f"The DeepSpeed configuration enables {precision}, and `autocast={asked!r}`. Make them agree."
            )
        if says is False and asked == precision:
            raise ConfigError(
                f"The DeepSpeed configuration disables {precision}, and `autocast={asked!r}`. Make them agree."
            )
        if says is True:
            given["autocast"] = precision


def fill_config(plugin: Any, batch_size: int, max_grad_norm: float | None, world_size: int) -> None:
    """Put the trainer's settings into the DeepSpeed configuration, "auto" or not."""
    # Windows are the loop's: it says at each micro-batch whether it is a step's last.
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,
        "train_batch_size": batch_size * world_size,
        "gradient_clipping": 0.0 if max_grad_norm is None else max_grad_norm,
    }


def schedule_of(content: Mapping[str, Any], **automatic: Any) -> Any:
    """Return the 'scheduler' of a DeepSpeed configuration as a callable of the optimizer.

    Args:
        content: Its type and params.
        automatic: What stands for "auto" among the params.

    Raises:
        ConfigError: If DeepSpeed has no such schedule.
    """
    from deepspeed.runtime import lr_schedules

    name = content.get("type")
    if name not in lr_schedules.VALID_LR_SCHEDULES:
        raise ConfigError(
            f"The DeepSpeed configuration has the scheduler {name!r}, which is none of "
            f"{', '.join(lr_schedules.VALID_LR_SCHEDULES)}."
        )
    options = {
        key: automatic.get(key) if value == "auto" else value for key, value in content.get("params", {}).items()
    }
    return functools.partial(getattr(lr_schedules, str(name)), **options)


class ZeroEngine:
    """DeepSpeed's engine around a model and its optimizer.

    Args:
        accelerator: Whose plugin has the configuration.
        model: The bare model.
        optimizer: PyTorch's, whose groups' options (the learning rate among them) stay in force, or accelerate's
            place-holder for the one in the configuration.

    Attributes:
        model: DeepSpeed's engine.
        optimizer: PyTorch's optimizer inside of it.
        prepared: accelerate's wrapper of DeepSpeed's, whose `step` does nothing.
    """

    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        named = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
        groups = getattr(optimizer, "param_groups", None) or [{"params": optimizer.params}]  # of a place-holder
        # DeepSpeed leaves groups without parameters out
        self._groups = [[named[id(one)] for one in group["params"]] for group in groups if group["params"]]
        self.stage = accelerator.state.deepspeed_plugin.zero_stage
        self.model, prepared = accelerator.prepare(model, optimizer)
        self.prepared = prepared
        self._zero = prepared.optimizer
        self._factor = 1.0
        self.optimizer: torch.optim.Optimizer = getattr(self._zero, "optimizer", self._zero)
        self._options = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def reset(self) -> None:
        """Forget the optimizer's past: its state, and what a schedule has made of its options."""
        groups = [{"params": names} for names in self._groups]
        self.load_optimizer({}, {"groups": groups}, "a new run")
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            group |= options

    # --- a step

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch; with `last` they are complete after it."""
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss)

    def scale_gradients(self, factor: float) -> None:
        """Have the next step multiply the gradients by `factor` before it looks at them."""
        self._factor = factor

    def step(self) -> tuple[float, bool]:
        """Clip and update; return the norm before clipping, and whether the update was made (all was finite)."""
        self.model.set_gradient_accumulation_boundary(True)
        # Where gradients lie differs between stages and offloads, but all of them divide by the scale of the loss.
        scaler = getattr(self._zero, "loss_scaler", None)
        if scaler is not None:
            scaler.cur_scale /= self._factor
        try:
            self.model.step()
        finally:
            if scaler is not None:
                scaler.cur_scale *= self._factor
            self._factor = 1.0
        norm = self.model.get_global_grad_norm()
        return float("nan") if norm is None else float(norm), self.model.was_step_applied()

    # --- tensors

    def weights(self) -> dict[str, Any]:
        """Return the weights by bare name: in full precision, put together one at a time when they are asked for."""
        parameters, found = self._parameters(), dict[str, Any]()
        tied = {bare_name(name) for name, _ in unwrap(self.model).named_parameters(remove_duplicate=False)}
        for raw, value in unwrap(self.model).state_dict().items():
            name = bare_name(raw)
            if name in parameters:
                one = parameters[name]
                found[name] = Gathered(_shape(one), _dtype(one), lambda one=one: self._read(one))
            elif name not in tied and isinstance(value, torch.Tensor):
                found[name] = value
        return found

    def load_weights(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        """Take over what `weights` returned, one at a time: the parameters and their copies in full precision.

        Raises:
            CheckpointError: If they are not this model's.
        """
        present, parameters = self.weights(), self._parameters()
        check_fit({name: (name, tuple(tensor.shape)) for name, tensor in present.items()}, tensors, where)
        buffers = {bare_name(name): value for name, value in unwrap(self.model).named_buffers()}
        for name in present:
            value = tensors[name]
            if name in buffers:
                buffers[name].copy_(value)
                continue
            one = parameters[name]
            value = value.to(one.device)
            with self._gathered(one), torch.no_grad():
                one.copy_(value)
            if one.requires_grad:
                _set(one, value)

    def optimizer_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what `state.optimizer_state` would of the same optimizer, unsharded."""
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors: dict[str, Any] = {}
        numbers, vectors = self._entries()
        if vectors:
            self._link()  # DeepSpeed does it after the first step of the first group, when the others have no state
        parameters = self._parameters()
        for name in (name for group in self._groups for name in group):
            one = parameters[name]
            for entry in vectors:
                read = functools.partial(_on_host, safe_get_full_optimizer_state, one, entry)
                tensors[f"{name}/{entry}"] = Gathered(_shape(one), torch.float32, read)
            for entry, value in numbers.items():
                tensors[f"{name}/{entry}"] = torch.tensor(float(value), dtype=torch.float32)
        groups = [
            {**{key: to_json(value, key) for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        return tensors, {"groups": groups, "rest": {}, "shared": to_json({}, "")}

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor], saved: Any, where: str) -> None:
        """Take over what `optimizer_state` returned, one tensor at a time.

        Raises:
            CheckpointError: If the parameter groups are not those that were saved.
        """
        check_groups(self._groups, [group["params"] for group in saved["groups"]], where)
        for group, options in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            kept = {key: like(from_json(value), group.get(key)) for key, value in options.items() if key != "params"}
            group |= {key: value for key, value in kept.items() if key not in IMPLEMENTATION}
        by_entry: dict[str, list[str]] = {}
        for key in tensors:
            name, _, entry = key.rpartition("/")
            by_entry.setdefault(entry, []).append(name)
        numbers = {
            entry: tensors[f"{names[0]}/{entry}"]
            for entry, names in by_entry.items()
            if all(not shape_of(tensors, f"{name}/{entry}") for name in names)
        }
        self.optimizer.state.clear()
        if not by_entry:
            return
        for flat in self._partitions():
            vectors = {entry: torch.zeros_like(flat) for entry in by_entry if entry not in numbers}
            self.optimizer.state[flat] = {**{entry: value.clone() for entry, value in numbers.items()}, **vectors}
        self._link()
        parameters = self._parameters()
        for entry, names in by_entry.items():
            for name in names if entry not in numbers else ():
                _set(parameters[name], tensors[f"{name}/{entry}"], entry)

    def _link(self) -> None:
        """Renew the views that stages 1 and 2 keep of each parameter's part of the state."""
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {bare_name(name): one for name, one in unwrap(self.model).named_parameters()}

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            return _on_host(safe_get_full_fp32_param, parameter).to(_dtype(parameter))
        with self._gathered(parameter):
            return parameter.detach().cpu().clone()

    @staticmethod
    def _gathered(parameter: nn.Parameter) -> Any:
        """Return the context in which a parameter of stage 3 is whole."""
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id"))

    def _entries(self) -> tuple[dict[str, Any], list[str]]:
        """Return the entries of the optimizer's state: numbers, which all parameters share, and names of vectors."""
        for flat, held in self.optimizer.state.items():
            vectors = [key for key, value in held.items() if torch.is_tensor(value) and value.shape == flat.shape]
            return {key: value for key, value in held.items() if key not in vectors}, vectors
        return {}, []

    def _partitions(self) -> list[torch.Tensor]:
        """Return the flat full-precision tensors of this process, by which the optimizer's state is keyed."""
        flat = getattr(self._zero, "single_partition_of_fp32_groups", None)
        return list(self._zero.fp32_partitioned_groups_flat if flat is None else flat)


def _set(parameter: Any, value: torch.Tensor, *entry: str) -> None:
    """Set the full-precision copy of a parameter, or an entry of the optimizer's state for it."""
    from deepspeed import utils

    value = value.detach().float().to(parameter.device)
    if not hasattr(parameter, "ds_id"):
        set_full = utils.safe_set_full_optimizer_state if entry else utils.safe_set_full_fp32_param
        set_full(parameter, value, *entry)
        return
    # stage 3's own call for the whole fails where the parts are padded
    size = parameter.ds_tensor.numel()
    part = value.new_zeros(size)
    own = value.flatten()[size * torch.distributed.get_rank(parameter.ds_process_group) :][:size]
    part[: own.numel()] = own
    set_local = utils.safe_set_local_optimizer_state if entry else utils.safe_set_local_fp32_param
    set_local(parameter, part, *entry)


def _on_host(read: Any, parameter: nn.Parameter, *entry: str) -> torch.Tensor:
    return read(parameter, *entry).detach().to("cpu", copy=True).reshape(_shape(parameter))


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype to save in: the full precision that ZeRO keeps of what it trains."""
    return torch.float32 if parameter.requires_grad else parameter.dtype
