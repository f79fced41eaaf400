"""Export of the model to one file, with a card."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map_only

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.core.errors import ConfigError, MissingExtraError
from omnitrain.core.metric_format import format_metric
from omnitrain.data.collation import LABEL_KEYS, tensors_in
from omnitrain.data.loaders import Loader

if TYPE_CHECKING:
    from omnitrain.trainer.evaluation import Evaluation

_LOADING = {
    ".pt2": 'program = torch.export.load("{name}").module()  # called as the model is',
    ".onnx": 'session = onnxruntime.InferenceSession("{name}")',
}


def export_model(evaluation: Evaluation, loader: Loader, path: Path, overwrite: bool) -> Path:
    """Write the model as `torch.export` records it for a batch of a loader, with a card next to it; return the path.

    Raises:
        ConfigError: On all ranks, if the file cannot be written, or the model cannot be exported.
        MissingExtraError: If ONNX needs a package.
    """
    trainer = evaluation.trainer
    if path.suffix not in _LOADING:
        raise ConfigError(f"The file to export to must end with '.pt2' or '.onnx', got {path.name!r}.")
    for package in ("onnx", "onnxscript") if path.suffix == ".onnx" else ():
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("Export to ONNX", package)
    if trainer.backend.forward_is_collective:
        raise ConfigError(
            f"A model that {trainer.backend.sharding} shards cannot be exported. Call save_model(folder), and export "
            "on one process, after loading it by `init_from`."
        )
    card = path.with_name(f"{path.name}.md")
    if path.exists() and not overwrite:
        raise ConfigError(f"{str(path)!r} exists already. Pass overwrite=True, or another path.")
    args, kwargs = _example_inputs(evaluation, loader)

    def write() -> Path:
        # until the file is there, as the program has the tensors of the model
        with evaluation.outside_run(), evaluation.eval_weights.swapped_in(), torch.no_grad():
            model = unwrap(trainer.backend.model)
            was_training = {module: module.training for module in model.modules()}
            try:
                model.eval()
                outputs = [output.cpu() for output in tensors_in(model(*args, **kwargs))]
                program = _export(model, args, kwargs)
            finally:
                for module, mode in was_training.items():
                    module.training = mode
            if trainer.device.type != "cpu":  # so that the file runs on any machine
                program = move_to_device_pass(program, "cpu")
            inputs = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, _tensor_inputs(kwargs)))
            results = [*tensors_in(program.module()(*inputs[0], **inputs[1]))]
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".part-{path.name}")
            if path.suffix == ".onnx":
                torch.onnx.export(program, (), part, verbose=False, external_data=False)
            else:
                torch.export.save(program, part)
        error = max((float((a - b).abs().max()) for a, b in zip(outputs, results, strict=True) if a.numel()), default=0)
        os.replace(part, path)
        card.write_text(_card(evaluation, path, model, (args, kwargs), outputs, error), encoding="utf-8")
        return path

    return trainer.ranks.on_main("the exported model", write)


def _example_inputs(evaluation: Evaluation, loader: Loader) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that the model gets for a batch of at least two rows, without labels."""
    trainer, calls = evaluation.trainer, list[tuple[tuple[Any, ...], dict[str, Any]]]()
    model = unwrap(trainer.backend.model)
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        evaluation.rehearse_batches(loader)
    finally:
        handle.remove()
    if not calls:
        raise ConfigError(
            f"The {type(trainer.unit).__name__} never calls the model, so its inputs are unknown. Export it by "
            "torch.export.export(model, inputs)."
        )
    args, kwargs = calls[0]
    labels = {*LABEL_KEYS, *(trainer.settings.label_names or ())}
    kwargs = {name: value for name, value in kwargs.items() if name not in labels and value is not None}
    if _count_rows(args, kwargs) == 1:  # which would be recorded as the only possible number
        args, kwargs = tree_map_only(torch.Tensor, _double, (args, kwargs))
    return args, kwargs


def _tensor_inputs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have tensors; the others are constants of the model."""
    return {name: value for name, value in kwargs.items() if next(tensors_in(value), None) is not None}


def _count_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return next((len(tensor) for tensor in tensors_in((*args, *kwargs.values())) if tensor.ndim), 0)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor]) if tensor.ndim and len(tensor) == 1 else tensor


def _export(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    rows, inputs = _count_rows(args, kwargs), _tensor_inputs(kwargs)
    shapes = {name: _dynamic(value, rows) for name, value in zip(_positional_names(model), args, strict=False)}
    shapes |= {name: _dynamic(value, rows) for name, value in inputs.items()}
    # otherwise `use_cache=False` and the like would have to be passed to the program, too
    constants = {name: value for name, value in kwargs.items() if name not in inputs}
    replaced = vars(model).get("forward")
    if constants:
        model.forward = functools.partial(model.forward, **constants)
    try:
        return torch.export.export(model, args, inputs, dynamic_shapes=shapes)
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be exported: {' '.join(str(error).split())[:300]} See the limits of "
            "torch.export, such as branches on values of tensors."
        ) from error
    finally:
        if replaced is not None:
            model.forward = replaced
        elif constants:
            del model.forward


def _positional_names(model: nn.Module) -> list[str]:
    return [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind is not p.VAR_KEYWORD]


def _dynamic(value: Any, rows: int) -> Any:
    """Return which dimensions of an input may change: that of the rows, and those that the model leaves open."""
    if isinstance(value, torch.Tensor):
        is_batch = value.ndim and len(value) == rows
        return {place: Dim.DYNAMIC if is_batch and not place else Dim.AUTO for place in range(value.ndim)}
    if isinstance(value, Mapping):
        return {name: _dynamic(entry, rows) for name, entry in value.items()}
    return type(value)(_dynamic(entry, rows) for entry in value) if type(value) in (list, tuple) else None


def _card(
    evaluation: Evaluation, path: Path, model: nn.Module, inputs: Any, outputs: list[torch.Tensor], error: float
) -> str:
    trainer, lifecycle = evaluation.trainer, evaluation.lifecycle
    progress, best = lifecycle.progress, lifecycle.metrics["best_valid"]
    args, kwargs = inputs
    names = _positional_names(model)[: len(args)]
    rows = [("input", name, value) for name, value in {**dict(zip(names, args, strict=True)), **kwargs}.items()]
    rows += [("output", str(place), value) for place, value in enumerate(outputs)]
    lines = [f"# {type(model).__name__}", ""]
    lines += [
        f"Exported by PyTorch {torch.__version__} on {trainer.device.type}, after step {progress.step} of training.",
        "",
    ]
    lines += ["| | name | dtype | shape |", "|---|---|---|---|"]
    for kind, name, value in rows:
        for tensor in tensors_in(value):
            is_batch = tensor.ndim and len(tensor) == len(outputs[0])
            shape = (
                ", ".join(["batch" if is_batch else str(len(tensor)), *map(str, tensor.shape[1:])])
                if tensor.ndim
                else ""
            )
            lines.append(f"| {kind} | `{name}` | {str(tensor.dtype).removeprefix('torch.')} | ({shape}) |")
    shown = [format_metric(name, value) for name, value in best.items() if name not in ("step", "epoch")]
    if shown:
        lines += ["", f"Best evaluation: {', '.join(shown)}."]
    lines += ["", f"Largest difference to the outputs of the model: {error:.1e}.", ""]
    return "\n".join([*lines, "```python", _LOADING[path.suffix].format(name=path.name), "```", ""])
