"""The backend for DeepSpeed ZeRO.

Its engine runs backward, clips and steps by itself, on tensors sharded in its own buffers. Weights and optimizer state
are read and written per parameter, so a checkpoint holds what any other backend would have written. `deepspeed.py` has
the configuration.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from omnitrain.arguments import DEFAULTS
from omnitrain.backends.backend import NOTHING, Output
from omnitrain.backends.collective_order import LayerOrder, check_gradients
from omnitrain.backends.ddp import DDP, Runner, run_wrapped
from omnitrain.backends.deepspeed import fill_config
from omnitrain.backends.norms import match_norm_dtypes
from omnitrain.backends.start import (
    ShardTarget,
    WeightInitializer,
    flat_target,
    is_plain,
    named_tensors,
    preserve_shared_buffers,
)
from omnitrain.checkpoint.state_dicts import (
    ParamState,
    bare_name,
    check_fit,
    check_groups,
    check_options,
    check_state,
    custom_entries,
    from_json,
    like,
    load_with_custom_hooks,
    parameter_names,
    state_specs,
    to_json,
    unwrap,
)
from omnitrain.checkpoint.tensor_files import Gathered, is_local, read_part, spec_of
from omnitrain.compute.precision import Dtypes, growth_interval
from omnitrain.core.errors import CheckpointError, ConfigError, NonFiniteError
from omnitrain.optim.build import has_modes, needs_closure
from omnitrain.optim.muon import Muon
from omnitrain.optim.optimizer_kwargs import IMPLEMENTATION
from omnitrain.optim.sparse_gradients import check_optimizer, parameters_by_layout

logger: logging.Logger = logging.getLogger("omnitrain")


# The method of DeepSpeed's optimizer that adds up the gradients of a bucket, by the stage.
_REDUCTIONS = {
    1: "reduce_ipg_grads",
    2: "reduce_ipg_grads",
    3: "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
}


class LossScale(torch.amp.GradScaler):
    """DeepSpeed's own fp16 loss scale, with the settings and the state of PyTorch's; disabled without one."""

    _CONFIG_KEYS = (
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    )

    def __init__(self, settings: Sequence[float]) -> None:
        super().__init__("cpu", enabled=False)
        self._settings = settings
        self._scaler: Any = None

    def attach(self, scale: Any, config: Mapping[str, Any]) -> None:
        """Use DeepSpeed's `loss_scaler`, and set it up unless the entry "fp16" of its configuration does.

        Raises:
            ConfigError: If both the configuration and the argument set it.
        """
        self._enabled, self._scaler, settings = True, scale, self._settings
        configured = [name for name in self._CONFIG_KEYS if config.get(name, "auto") != "auto"]
        if configured and tuple(settings) != DEFAULTS["fp16_loss_scale"]:
            raise ConfigError(
                f"`fp16_loss_scale={settings!r}`, and the DeepSpeed configuration sets {configured[0]!r} of 'fp16'. "
                "Leave one of them out."
            )
        if not configured:
            scale.cur_scale, scale.min_scale, scale.raise_error_at_min_scale = float(settings[0]), 0.0, False
            scale.delayed_shift = scale.cur_hysteresis = 1
            scale.scale_window = growth_interval(settings)

    def get_scale(self) -> float:
        """Return the scale in force."""
        return 1.0 if self._scaler is None else float(self._scaler.cur_scale)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many steps without an overflow the scale doubles."""
        self._scaler.scale_window = new_interval

    def state_dict(self) -> dict[str, Any]:
        """Return the state of PyTorch's scaler at the same point, and what DeepSpeed counts besides."""
        scaler = self._scaler
        if scaler is None or not scaler.dynamic:
            return {}
        stable, window = scaler.cur_iter - scaler.last_overflow_iter - 1, scaler.scale_window
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1.0 / scaler.scale_factor,
            "growth_interval": window,
            "_growth_tracker": (stable - 1) % window if stable > 0 else 0,
            "deepspeed": [stable, scaler.cur_hysteresis],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this scaler, or of PyTorch's."""
        scaler = self._scaler
        if scaler is None or not scaler.dynamic:
            return
        stable, hysteresis = state_dict.get("deepspeed", (state_dict["_growth_tracker"] + 1, scaler.delayed_shift))
        scaler.cur_scale, scaler.scale_window = state_dict["scale"], state_dict["growth_interval"]
        scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = stable, -1, hysteresis


class Zero(DDP):
    """ZeRO 1, 2 or 3, as accelerate's DeepSpeed plugin says.

    Args:
        accelerator: accelerate's `Accelerator` with that plugin.
        batch_size: Samples of a micro-batch.
        max_grad_norm: The norm that DeepSpeed clips to, or None.
        optimizer_options: `lr` and `weight_decay` for an optimizer named in the DeepSpeed configuration.
        parts: The arguments of `Backend`. An optimizer built from them keeps its options, including the learning rate.
    """

    sharding: ClassVar[str | None] = "DEEPSPEED"
    has_master_weights = True
    unsupported: Mapping[str, str] = MappingProxyType(
        {
            "before_second_pass": "DeepSpeed's engine adds gradients up in its own buffers, and keeps those of both",
            "before_update": "DeepSpeed's engine clips and updates at once, in its own buffers",
            "gradients": "DeepSpeed keeps them in its own buffers",
            "rewinding": "DeepSpeed's engine has state of its own that cannot be restored in the middle of a run",
            "skipping": "DeepSpeed's engine has made the update when the norm of the gradients is known",
            "freezing": "DeepSpeed's optimizer updates buffers that hold frozen weights next to the others",
            "sparse_gradients": "DeepSpeed's engine adds gradients up in its own buffers, which are dense",
        }
    )
    forward_is_collective: ClassVar[bool] = True
    clips_in_update: ClassVar[bool] = True
    _is_last = True
    _was_applied = True
    _gathers_weights = False

    def __init__(
        self,
        accelerator: Any,
        batch_size: int,
        max_grad_norm: float | None,
        optimizer_options: Mapping[str, float],
        *parts: Any,
    ) -> None:
        super().__init__(accelerator, *parts)
        self._batch_size = batch_size
        self._max_grad_norm = max_grad_norm
        self._optimizer_options = optimizer_options
        # The names of the parameters, by `id`.
        self._names: dict[int, str] = {}
        # The parameters of which the latest backward pass has had gradients, by `id`.
        self._reduced = set[int]()

    def set_dtypes(self, dtypes: Dtypes) -> None:
        for name in ("parameters", "buffers"):
            if getattr(dtypes, name) is not None:
                raise ConfigError(
                    f"`dtypes` sets {name!r}, which DeepSpeed ZeRO casts itself, as autocast='bf16' and 'fp16' say, "
                    "and it updates a copy in fp32. Leave it out, or cast the model before it is passed."
                )
        super().set_dtypes(dtypes)

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        plugin = self.accelerator.state.deepspeed_plugin
        initializer: WeightInitializer | None = None
        is_born_so = any(
            hasattr(parameter, "ds_id") for parameter in self.model.parameters()
        )  # made under deepspeed.zero.Init
        if _partitions_weights(plugin.deepspeed_config) and is_plain(self.model) and not is_born_so:
            initializer = WeightInitializer(self.model, self.ranks, self.initial)
            initializer.fake_cpu_tensors()
        else:
            self._load_full_weights(always=True)
        if self.ranks.is_main and any(parameter.dtype == torch.float64 for parameter in self.model.parameters()):
            logger.warning("DeepSpeed updates weights of float64 in float32, and checkpoints hold them so.")
        reductions = Dtypes(reductions=self._reductions).described
        fill_config(
            plugin, self._batch_size, self._max_grad_norm, self.ranks.world_size, (reductions or {}).get("reductions")
        )
        optimizer: Any = self._placeholder() if "optimizer" in plugin.deepspeed_config else self._build_optimizer()
        name = type(optimizer).__name__
        # transformers and timm have an Adafactor of their own
        if isinstance(optimizer, Muon) or {"Muon", "Adafactor"} & {kind.__name__ for kind in type(optimizer).__mro__}:
            raise ConfigError(
                f"`optimizer={name.lower()!r}` does not work with DeepSpeed ZeRO, which updates flat parts of many "
                f"parameters, where {name} needs whole matrices. Use {'FSDP or ' if 'Muon' in name else ''}DDP, or "
                "another optimizer."
            )
        if hasattr(optimizer, "step") and needs_closure(optimizer):
            raise ConfigError(
                f"`optimizer` ({type(optimizer).__name__}) takes loss and gradients several times in a step, "
                "which DeepSpeed does not give it. Use DDP or one process, or another optimizer."
            )
        if hasattr(optimizer, "step"):
            check_optimizer(optimizer, {}, parameters_by_layout(self.model)[1])
        if has_modes(optimizer):
            raise ConfigError(
                f"`optimizer` ({type(optimizer).__name__}) has train() and eval(), which change the weights for "
                "evaluations, and DeepSpeed keeps these in its own buffers. Use DDP or FSDP, or another optimizer."
            )
        names = parameter_names(self.model)
        groups = getattr(optimizer, "param_groups", None) or [{"params": optimizer.params}]
        # DeepSpeed leaves groups without parameters out
        self._groups = [[names[id(parameter)] for parameter in group["params"]] for group in groups if group["params"]]
        if initializer is not None:
            self._partition(initializer, plugin.deepspeed_config)
            self._finish_initialization(initializer)
        if self.compile_options is not None:
            self.model.compile(**self.compile_options)  # in place, as ZeRO 3 replaces the modules' parameter dicts
        with preserve_shared_buffers(self.model):
            engine, prepared = self.accelerator.prepare(Runner(self.model), optimizer)
        if any(hasattr(parameter, "ds_id") for parameter in self.model.parameters()):
            hidden = dict.fromkeys(("weights", "updates"), "ZeRO 3 keeps the weights in its own partitions")
            self.unsupported = {**self.unsupported, **hidden}
        self._zero = prepared.optimizer  # DeepSpeed's optimizer, inside accelerate's, whose `step` does nothing
        self._factor = 1.0
        self._watch_reductions(engine.zero_optimization_stage())
        if engine.fp16_enabled() and isinstance(self.scaler, LossScale):
            self.scaler.attach(self._zero.loss_scaler, plugin.deepspeed_config.get("fp16", {}))
        self.optimizer = getattr(self._zero, "optimizer", self._zero)
        self._options = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        if self.device.type == "cpu":
            match_norm_dtypes(self.model)  # DeepSpeed casts weights and leaves statistics in fp32
        return self.model, engine

    def _watch_reductions(self, stage: int) -> None:
        """Have DeepSpeed add up gradients of the same parameters on all ranks, and in each micro-batch of all of them.

        It leaves out parameters without a gradient, which other ranks may have. After a micro-batch without one, ZeRO 3
        adds to the gradient of an earlier step, and offloading loses that of this step.
        """
        zero = self._zero
        self._gathers_weights = stage == 3
        self._names = parameter_names(self.model)
        if stage == 1 and not zero.overlap_comm:
            zero.reduce_gradients = functools.partial(_fill_and_reduce, zero, zero.reduce_gradients)
        elif hasattr(zero, place := _REDUCTIONS.get(stage, "")):
            setattr(zero, place, functools.partial(self._check_and_reduce, getattr(zero, place)))
            record, finish = zero.reduce_ready_partitions_and_remove_grads, zero.independent_gradient_partition_epilogue
            zero.reduce_ready_partitions_and_remove_grads = functools.partial(self._record_gradient, record)
            zero.independent_gradient_partition_epilogue = functools.partial(self._fill_gradients, finish)
        if stage == 3 and self.ranks.world_size > 1 and self.compile_options is None:
            remedy = "mark the class that chooses among them by deepspeed.utils.set_z3_leaf_modules, or use ZeRO 2"
            self._order = LayerOrder(self.ranks, _gathered_layers(self.model), remedy)

    def _record_gradient(self, record: Callable[..., None], parameter: nn.Parameter, *args: Any) -> None:
        self._reduced.add(id(parameter))
        record(parameter, *args)

    def _fill_gradients(self, finish: Callable[..., None], *args: Any) -> None:
        """Add zeros for parameters without a gradient before a backward pass ends."""
        zero = self._zero
        if not hasattr(zero, "bit16_groups"):  # ZeRO 3
            for group in zero.fp16_groups:
                for parameter in group:
                    if parameter.requires_grad and id(parameter) not in self._reduced:
                        data = parameter.data  # empty, unless DeepSpeed keeps it gathered
                        parameter.data = torch.zeros(parameter.ds_shape, dtype=data.dtype, device=data.device)
                        parameter.grad = torch.zeros_like(parameter)
                        zero.reduce_ready_partitions_and_remove_grads(parameter)
                        parameter.data = data
        elif zero.is_gradient_accumulation_boundary() or zero.partition_gradients:
            for number, group in enumerate(zero.bit16_groups):
                for parameter in group:
                    if parameter.requires_grad and id(parameter) not in self._reduced:
                        parameter.grad = torch.zeros_like(parameter)
                        zero.process_gradients(parameter, number)
        finish(*args)

    def _check_and_reduce(self, reduce: Callable[..., None], *args: Any, **options: Any) -> None:
        """Compare over the ranks which gradients `reduce` is about to add up, and put them into one order."""
        zero, dtypes = self._zero, [*args, *options.values()]
        for dtype in dtypes or sorted(zero.ipg_buckets, key=str):
            bucket = zero.ipg_buckets[dtype]
            if hasattr(zero, "bit16_groups"):
                members = [zero.bit16_groups[group][position] for group, position, *_ in bucket.params]
                if not check_gradients(self.ranks, [self._names[id(member)] for member in members]):
                    _sort_bucket(bucket, zero.contiguous_gradients)
            else:
                members = sorted(bucket.params, key=lambda member: member.ds_id)  # as ZeRO 3 does
                check_gradients(self.ranks, [self._names[id(member)] for member in members])
        reduce(*args, **options)

    def _partition(self, initializer: WeightInitializer, config: Mapping[str, Any]) -> None:
        """Partition the weights as stage 3 does, on the meta device, and fill each rank's partitions."""
        import deepspeed

        parts = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=_partition_config(config))
        cast = next((dtype for name, dtype in _CASTS.items() if _is_enabled(config, name)), None)
        initializer.collect_tensors()
        targets: dict[str, ShardTarget] = {}
        for name, tensor in named_tensors(self.model):
            if not isinstance(tensor, nn.Parameter):
                targets[name] = initializer.move_buffer(name, tensor, parts.local_device)
                continue
            dtype = cast if cast is not None and tensor.is_floating_point() else tensor.dtype
            tensor.data = torch.empty(
                tensor.shape, dtype=dtype, device=parts.local_device
            )  # one at a time, not written to
            parts._convert_to_deepspeed_param(tensor)
            tensor.partition()  # type: ignore[attr-defined]
            targets[name] = flat_target(tensor.ds_tensor, *_bounds(tensor))  # type: ignore[attr-defined]
        initializer.load(targets)

    def _placeholder(self) -> Any:
        """Return accelerate's placeholder for an optimizer that DeepSpeed creates from its configuration."""
        from accelerate.utils import DummyOptim

        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return DummyOptim(trainable, **self._optimizer_options)  # type: ignore[arg-type]

    def release(self) -> None:
        """Destroy DeepSpeed's engine, which would keep the model until the program ends."""
        if self.wrapped is not self.model:
            self.wrapped.destroy()  # type: ignore[operator]

    def reset_optimizer(self) -> None:
        groups = [{"params": names} for names in self._groups]
        self.load_optimizer({}, {"groups": groups}, "a new run")
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            group |= options

    # --- a step

    @property
    def can_skip(self) -> bool:
        return bool(self.wrapped.fp16_enabled())  # type: ignore[operator]

    def forward(self, run: Callable[[nn.Module, Any], Output], batch: Any) -> Output:
        device_type = self.device.type
        if torch.is_autocast_enabled(device_type):  # which DeepSpeed's engine disables on GPUs
            dtype, is_cached = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
            run = torch.autocast(device_type, dtype, cache_enabled=is_cached)(run)
        try:
            return run_wrapped(self.wrapped, run, batch)
        except RuntimeError as error:
            if self.compile_options is not None and "size=(0,)" in str(error) and self._gathers_weights:
                raise ConfigError(
                    "`compile` cannot be used with this model and ZeRO 3: it uses a weight that is not gathered, since "
                    "DeepSpeed gathers those of a module where it is called, and a compiled module uses that of "
                    "another. Call the module that has the weight, name it in the __init__ of the one that uses it "
                    "(deepspeed.zero.register_external_parameter(self, weight)), or leave `compile` out."
                ) from error
            if "disagreement on list contents" not in str(error) or self._order is None:
                raise
            names = {getattr(module, "ds_id", None): name for name, module in self.model.named_modules()}
            called = [
                [names[int(number)] for number in numbers.split(",") if int(number) in names]
                for numbers in re.findall(r"rank\d+: \[([\d, ]+)\]", str(error))
            ]
            # only this rank raises it, and the others are notified of any other error than DistributedError
            raise RuntimeError(str(self._order.error(called))) from error

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self._is_last = last
        return NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        if self._order is not None:
            self._order.end_forward()
        self._reduced.clear()
        self.wrapped.set_gradient_accumulation_boundary(self._is_last)  # type: ignore[operator]
        self.wrapped.backward(loss)  # type: ignore[operator]
        if self._order is not None and self._is_last:
            self._order.end_window()

    def scale_gradients(self, factor: float) -> None:
        self._factor = factor  # applied when the next step unscales

    def clip_gradients(self, max_norm: float | None, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Have DeepSpeed clip, check and update, all at once; return the norm before clipping."""
        engine: Any = self.wrapped
        engine.set_gradient_accumulation_boundary(True)
        # Stages and offloads keep gradients in different places, but all of them divide by the loss scale.
        scaler = getattr(self._zero, "loss_scaler", None)
        if scaler is not None:
            scaler.cur_scale /= self._factor
        try:
            engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise NonFiniteError(
                "The gradients overflow at 'min_loss_scale' of the DeepSpeed configuration. Lower the learning rate, "
                "use autocast='bf16', or lower that minimum."
            ) from error
        finally:
            if scaler is not None:
                scaler.cur_scale *= self._factor
            self._factor = 1.0
        norm, self._was_applied = engine.get_global_grad_norm(), engine.was_step_applied()
        return torch.tensor(float("nan") if norm is None else float(norm), dtype=torch.float64)

    def clear_gradients(self) -> None:
        """Free the gradients of the model; DeepSpeed keeps those of the optimizer, in host memory if it offloads."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def has_gradients(self) -> bool:
        return True  # gradients are in DeepSpeed's buffers

    def ungrouped_parameters(self) -> list[str]:
        grouped = {name for group in self._groups for name in group}
        return [
            name for name, parameter in self._parameters().items() if parameter.requires_grad and name not in grouped
        ]

    def update(self) -> bool:
        return self._was_applied  # `clip_gradients` made the update

    def reset_scaler(self) -> None:
        """Do nothing: DeepSpeed unscales the gradients in its own update."""

    # --- checkpoints

    def model_tensors(self) -> dict[str, Any]:
        """Return the weights in full precision, each gathered from all ranks on reading."""
        parameters, tensors, model = self._parameters(), dict[str, Any](), unwrap(self.model)
        tied = {bare_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
        first = {name for name, _ in model.named_buffers()}
        tied |= {bare_name(name) for name, _ in model.named_buffers(remove_duplicate=False) if name not in first}
        for raw, value in model.state_dict().items():
            name = bare_name(raw)
            if name in parameters:
                parameter = parameters[name]
                read = functools.partial(self._read, parameter)
                local = functools.partial(getattr, parameter, "ds_tensor", parameter)  # stage 3 has it there
                flat = self._flat_reader(parameter)
                tensors[name] = Gathered(_shape(parameter), _dtype(parameter), read, local, flat)
            elif name not in tied and isinstance(value, torch.Tensor):
                tensors[name] = value
        return tensors

    def check_weights(self, tensors: Mapping[str, Any], where: str, absent: Collection[str] = ()) -> None:
        specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.model_tensors().items()}
        first = {id(tensor): bare_name(name) for name, tensor in unwrap(self.model).named_buffers()}
        buffers = unwrap(self.model).named_buffers(remove_duplicate=False)
        tied = {bare_name(name) for name, tensor in buffers if first[id(tensor)] in specs}
        check_fit(specs, tensors, where, tied, absent)

    def load_weights(
        self, tensors: Mapping[str, torch.Tensor], where: str, extra: Mapping[str, Any], absent: Collection[str] = ()
    ) -> None:
        """Copy weights into the parameters and their full-precision copies.

        All are read first, except those that no rank can hold its range of: these are read and copied one at a time.

        Raises:
            CheckpointError: On all ranks, if they do not fit this model or a rank cannot read them; the model is
                unchanged.
            RuntimeError: If one of the exceptions cannot be read; the model has some of the weights.
        """
        self.check_weights(tensors, where, absent)
        parameters = self._parameters()
        present = [name for name in self.model_tensors() if name in tensors]
        in_turn = [name for name in present if name in parameters and not self._has_flat_ranges(parameters[name])]
        buffers: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}

        def read() -> None:
            for name in present:
                if name not in parameters:
                    buffers[name] = read_part(tensors, name)
                elif name not in in_turn:
                    parameter = parameters[name]
                    is_full = _is_gathered(parameter)
                    values[name] = read_part(tensors, name) if is_full else _read_range(parameter, tensors, name)

        self.ranks.run_on_all("the reading of weights", read)
        content = buffers | {name: from_json(value) for name, value in extra.items()}
        load_with_custom_hooks(self.model, content, where, self.ranks)
        for name in list(values):
            _set_local(parameters[name], values.pop(name))
        for name in in_turn:
            self._load_gathered(parameters[name], tensors, name, where)

    def _load_gathered(
        self, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor], name: str, where: str
    ) -> None:
        try:
            value = tensors[name].to(parameter.device)
        except CheckpointError as error:  # no longer one after which a run could continue
            raise RuntimeError(f"{where}: the model has only some of its weights now: {error}") from error
        with self._gathered(parameter), torch.no_grad():
            parameter.copy_(value)
        if parameter.requires_grad:
            begin, end = _bounds(parameter)
            _set_range(parameter, value.flatten()[begin:end])

    def local_shard(self, tensor: Any) -> torch.Tensor:
        # DeepSpeed's buffers differ between stages, so the full weight is copied, as in a checkpoint
        return tensor.read() if isinstance(tensor, Gathered) else tensor.detach()

    def optimizer_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the same optimizer on one device, each tensor gathered from all ranks on reading."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if isinstance(self.optimizer, torch.optim.Optimizer) and self.optimizer is not self._zero:
            custom_entries(self.optimizer, is_sharded=True)
        tensors: dict[str, Any] = {}
        numbers, vectors = self._entries()
        if vectors:
            self._link_state()  # DeepSpeed does it after the first group's first step, when other groups have no state
        parameters = self._parameters()
        for name in (name for group in self._groups for name in group):
            parameter = parameters[name]
            for entry in vectors:
                read = functools.partial(_copy_to_host, safe_get_full_optimizer_state, parameter, entry)
                tensors[f"{name}/{entry}"] = Gathered(
                    _shape(parameter), torch.float32, read, flat=self._flat_reader(parameter, entry)
                )
            for entry, value in numbers.items():
                tensors[f"{name}/{entry}"] = torch.tensor(float(value), dtype=torch.float32)
        groups = [
            {**{key: to_json(value, key) for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        return tensors, {"groups": groups, "rest": {}, "shared": to_json({}, "")}

    def names_by_group(self) -> list[list[str]]:
        return self._groups

    def check_optimizer(self, tensors: Mapping[str, Any], saved: Any, where: str) -> None:
        """Reject a state that the same optimizer would not have on one device; ZeRO keeps it in full precision."""
        check_groups(self._groups, saved["groups"], where)
        check_options(self.optimizer, saved["groups"], where)
        flat = state_specs(self.optimizer)  # for its flat tensors, in which parameters follow each other
        entries: dict[str, tuple[int, ...]] = {}
        for key in tensors:  # a vector is a number only where the parameter is one
            entry = key.rpartition("/")[2]
            entries[entry] = entries.get(entry) or spec_of(tensors, key)[0]
        parameters, expected = self._parameters(), dict[str, ParamState]()
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            state = ParamState({})
            for parameter in group["params"]:
                state = flat[id(parameter)]
            shapes = {entry: shape for entry, (shape, _) in state.specs.items()} or entries
            for name in names:
                shape_of = _shape(parameters[name])
                specs = {entry: (shape_of if shape else (), torch.float32) for entry, shape in shapes.items()}
                expected[name] = ParamState(specs, state.required)
        check_state(expected, tensors, (), where)

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor], saved: Any, where: str) -> None:
        self.check_optimizer(tensors, saved, where)
        for group, options in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            loaded = {key: like(from_json(value), group.get(key)) for key, value in options.items() if key != "params"}
            group |= {key: value for key, value in loaded.items() if key not in IMPLEMENTATION}
        by_entry: dict[str, list[str]] = {}
        for key in tensors:
            name, _, entry = key.rpartition("/")
            by_entry.setdefault(entry, []).append(name)
        numbers = {
            entry: read_part(tensors, f"{names[0]}/{entry}")
            for entry, names in by_entry.items()
            if all(spec_of(tensors, f"{name}/{entry}")[0] == () for name in names)
        }
        self.optimizer.state.clear()
        if not by_entry:
            return
        # the kernels of such optimizers count steps on the GPU; others count on the host, and would wait for the GPU
        counts_on_device = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
        for flat in self._partitions():
            vectors = {entry: torch.zeros_like(flat) for entry in by_entry if entry not in numbers}
            device = flat.device if counts_on_device else torch.device("cpu")
            copies = {entry: value.to(device, copy=True) for entry, value in numbers.items()}
            self.optimizer.state[flat] = {**copies, **vectors}
        self._link_state()
        parameters = self._parameters()
        for entry, names in by_entry.items():
            for name in names if entry not in numbers else ():
                _set_range(parameters[name], _read_range(parameters[name], tensors, f"{name}/{entry}"), entry)

    def _link_state(self) -> None:
        """Update the views that stages 1 and 2 keep of each parameter's part of the state."""
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {bare_name(name): parameter for name, parameter in unwrap(self.model).named_parameters()}

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            return _copy_to_host(safe_get_full_fp32_param, parameter).to(_dtype(parameter))
        with self._gathered(parameter):
            return parameter.detach().cpu().clone()

    def _flat_reader(self, parameter: Any, *entry: str) -> Callable[[], tuple[int, torch.Tensor]] | None:
        """Return what `Gathered.flat` is for a parameter, or for an entry of the optimizer's state for it."""
        if not self._has_flat_ranges(parameter):
            return None
        if parameter.requires_grad or hasattr(parameter, "ds_id"):
            return functools.partial(_range, parameter, *entry)
        return functools.partial(_full_range, parameter, self.ranks.is_main)

    def _has_flat_ranges(self, parameter: Any) -> bool:
        """Return whether the ranks hold disjoint ranges of a parameter as plain numbers; the same on all of them."""
        if not hasattr(parameter, "ds_id"):
            group = getattr(parameter, "_dp_group", None)
            return group is None or torch.distributed.get_world_size(group) == self.ranks.world_size
        part = parameter.ds_tensor
        return (
            torch.distributed.get_world_size(parameter.ds_process_group) == self.ranks.world_size
            and getattr(parameter, "ds_secondary_tensor", None) is None  # of ZeRO++, to be renewed with the other
            and not hasattr(part, "ds_quant_scale")
            and getattr(part.final_location, "value", part.final_location) != "nvme"
        )

    @staticmethod
    def _gathered(parameter: nn.Parameter) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id"))

    def _entries(self) -> tuple[dict[str, Any], list[str]]:
        """Return the entries of the optimizer's state: numbers shared by all parameters, and the names of vectors."""
        for flat, state in self.optimizer.state.items():
            vectors = [key for key, value in state.items() if torch.is_tensor(value) and value.shape == flat.shape]
            return {key: value for key, value in state.items() if key not in vectors}, vectors
        return {}, []

    def _partitions(self) -> list[torch.Tensor]:
        """Return this rank's flat full-precision tensors, which are the keys of the optimizer's state."""
        flat = getattr(self._zero, "single_partition_of_fp32_groups", None)
        return list(self._zero.fp32_partitioned_groups_flat if flat is None else flat)


# The dtypes that DeepSpeed casts weights to before it partitions them, by entries of its configuration.
_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _is_enabled(config: Mapping[str, Any], name: str) -> bool:
    return config.get(name, {}).get("enabled") is True


def _partitions_weights(config: Mapping[str, Any]) -> bool:
    """Return whether weights are partitioned over all ranks, in memory and unquantized."""
    zero = config.get("zero_optimization", {})
    offload = zero.get("offload_param") or {}
    unsupported = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "mics_shard_size")
    is_grouped = zero.get("zero_hpz_partition_size", 1) not in (1, "auto")
    is_plain = not any(zero.get(name) not in (None, False, "auto", -1) for name in unsupported)
    return zero.get("stage") == 3 and offload.get("device") != "nvme" and is_plain and not is_grouped


def _partition_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that partitions weights; accelerate fills in the rest later."""
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return settings | {name: {"enabled": True} for name in _CASTS if _is_enabled(config, name)}


def _range(parameter: Any, *entry: str) -> tuple[int, torch.Tensor]:
    """Return where this rank's range of a parameter begins, and its values; or those of an entry of its state."""
    from deepspeed import utils

    begin, end = _bounds(parameter)
    if begin == end:  # stages 1 and 2 have no copy of an empty parameter
        return begin, torch.empty(0, dtype=torch.float32)
    if not hasattr(parameter, "ds_id"):
        values = parameter._hp_mapping.get_hp_fragment(*entry).float()
    elif not parameter.requires_grad:
        values = parameter.ds_tensor
    elif entry:
        values = utils.safe_get_local_optimizer_state(parameter, *entry).float()
    else:
        values = utils.safe_get_local_fp32_param(parameter).float()
    return begin, values.detach().flatten()[: end - begin]


def _full_range(parameter: nn.Parameter, is_main: bool) -> tuple[int, torch.Tensor]:
    values = parameter.detach().flatten()
    return 0, values if is_main else values[:0]


def _bounds(parameter: Any) -> tuple[int, int]:
    """Return the range of a parameter that is this rank's, without the padding that stage 3 has at its end."""
    if not hasattr(parameter, "ds_id"):
        mapping = getattr(parameter, "_hp_mapping", None)  # an empty parameter has none
        address = None if mapping is None else mapping.lp_fragment_address
        return (0, 0) if address is None else (address.start, address.start + address.numel)
    size, numel = parameter.ds_tensor.numel(), parameter.ds_numel
    begin = min(size * torch.distributed.get_rank(parameter.ds_process_group), numel)
    return begin, min(begin + size, numel)


def _is_gathered(parameter: Any) -> bool:
    """Return whether this rank has the full weight, as it has small ones under stage 3."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return not hasattr(parameter, "ds_id") or parameter.ds_status == ZeroParamStatus.AVAILABLE


def _read_range(parameter: Any, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    begin, end = _bounds(parameter)
    if is_local(tensors):
        return tensors.part(name, begin, end)
    return tensors[name].flatten()[begin:end].clone()  # a view would keep the full tensor in memory


def _set_local(parameter: Any, value: torch.Tensor) -> None:
    """Set a weight to its values, all of them where this rank has them, without communication."""
    begin, end = _bounds(parameter)
    with torch.no_grad():
        if _is_gathered(parameter):
            parameter.copy_(value)
            value = value.flatten()[begin:end]
        if hasattr(parameter, "ds_id"):
            parameter.ds_tensor.data.view(-1)[: end - begin].copy_(value)
    if parameter.requires_grad:
        _set_range(parameter, value)


def _set_range(parameter: Any, part: torch.Tensor, *entry: str) -> None:
    from deepspeed import utils

    if not part.numel():
        return
    if not hasattr(parameter, "ds_id"):
        parameter._hp_mapping.get_hp_fragment(*entry).data.copy_(part.view(-1))
        return
    padded = torch.zeros(parameter.ds_tensor.numel(), device=parameter.device)
    padded[: part.numel()] = part
    set_local = utils.safe_set_local_optimizer_state if entry else utils.safe_set_local_fp32_param
    set_local(parameter, padded, *entry)


def _copy_to_host(read: Any, parameter: nn.Parameter, *entry: str) -> torch.Tensor:
    shape = _shape(parameter)
    if not math.prod(shape):  # of which stages 1 and 2 have no copy
        return torch.empty(shape, dtype=torch.float32)
    return read(parameter, *entry).detach().to("cpu", copy=True).reshape(shape)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype to save in: full precision, as ZeRO keeps it for what it trains."""
    return torch.float32 if parameter.requires_grad else parameter.dtype


def _fill_and_reduce(zero: Any, reduce: Callable[..., None], *args: Any, **options: Any) -> None:
    """Add zeros for parameters without a gradient, which other ranks may have: DeepSpeed adds up what there is."""
    for group in zero.bit16_groups:
        for parameter in group:
            if parameter.requires_grad and zero.get_gradient_for_reduction(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
    if zero.use_grad_accum_attribute:
        zero.fill_grad_accum_attribute()
    reduce(*args, **options)


def _sort_bucket(bucket: Any, is_contiguous: bool) -> None:
    """Sort the gradients of a bucket by DeepSpeed's numbers of the parameters, in its buffer too."""
    order = sorted(range(len(bucket.params)), key=lambda place: bucket.params[place][2])
    bucket.params[:], bucket.grads[:] = [bucket.params[k] for k in order], [bucket.grads[k] for k in order]
    if not is_contiguous or len(order) < 2:
        return
    buffer, position = bucket.buffer[bucket.index], 0
    buffer.narrow(0, 0, bucket.elements).copy_(torch.cat([gradient.reshape(-1) for gradient in bucket.grads]))
    for gradient in bucket.grads:
        gradient.data = buffer.narrow(0, position, gradient.numel()).view_as(gradient)
        position += gradient.numel()


def _gathered_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose calls gather weights in ZeRO 3, by name."""
    from deepspeed.utils import z3_leaf_module

    layers, leaf = dict[str, nn.Module](), None
    for name, module in model.named_modules():
        if leaf is not None and name.startswith(leaf):
            continue
        is_leaf = z3_leaf_module(module)
        leaf = (f"{name}." if name else "") if is_leaf else None
        if is_leaf or next(module.parameters(recurse=False), None) is not None:
            layers[name] = module
    return layers
