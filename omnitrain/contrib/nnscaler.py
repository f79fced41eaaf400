"""Conversion of nnScaler's configuration files.

`convert` maps plain values to plain values and imports nothing. Converted files call the functions at the end of the
module where a class and its arguments are not enough. What nnScaler itself rejects is not checked again.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from omnitrain.callbacks.train_hook import UNSUPPORTED_HOOKS, TrainHook
from omnitrain.config.reading import Tree
from omnitrain.core.errors import ConfigError, did_you_mean

_STAGES = "type train_args:map val_args:map test_args:map"
# nnScaler's keys by section, with the types of those that are computed with; any other key is an error in nnScaler too.
_KEYS: dict[str, dict[str, str]] = {
    section: {name: kind for name, _, kind in (key.partition(":") for key in keys.split())}
    for section, keys in {
        "": "init_module vars:map compute_config:map gen_savedir gen_reuse pas_policy broadcast_strategy instance_name "
            "run_mode dummy_sample_gen_fn tracing_from_weights model:map optimizer:map dataset:map dataloader:map "
            "dataset_sampler:map lr_scheduler:map checkpoint:map log:list hook:map debug:map precision "
            "micro_batch_size:count global_batch_size:int grad_accumulation_steps:int max_epochs:int "
            "max_train_steps:int max_val_steps:int val_every_n_train_steps:int val_every_n_epochs:int "
            "enable_progress_bar:bool log_progress_every_n_train_steps seed:int init_env_fn "
            "dummy_sample_post_process_fn",
        "compute_config": "plan_ngpus:count runtime_ngpus:count constant_folding trace_strategy use_zero zero_ngroups "
            "zero_use_reduce_scatter zero_param_level_sharding inference_only use_end2end use_async_reducer "
            "reducer_bucket_cap_mb pas_config user_config",
        "model": "type args:map parallel_modules",
        "optimizer": "type args:map clip_gnorm:number loss_reduction grad_reduction aggregate_outputs_fn param_clss_fn "
            "grad_reduce_divisor",
        "dataset": _STAGES,
        "dataloader": _STAGES,
        "dataset_sampler": _STAGES,
        "lr_scheduler": "type args:map interval",
        "checkpoint": "save_dir no_save:bool format serializer save_type save_last:bool save_best:bool "
            "symlink_best_and_last every_n_train_steps:int every_n_epochs:int keep_last_n_checkpoints:int resume_from",
        "checkpoint.resume_from": "checkpoint convert_fn with_merged save_memory",
        "log": "type args:map",
        "hook": "type args:map",
        "debug": "check_gradient_sync_cross_devices",
        # arguments of PyTorch's own classes
        "dataloader.train_args": "num_workers pin_memory prefetch_factor drop_last collate_fn persistent_workers "
            "shuffle dataset sampler timeout worker_init_fn multiprocessing_context generator pin_memory_device "
            "in_order",
        "dataset_sampler.train_args": "shuffle seed drop_last dataset num_replicas rank",
    }.items()
}  # fmt: skip
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"), "count": ((int,), "an integer of at least 1"),
    "number": ((int, float), "a number"), "bool": ((bool,), "true or false"),
    "map": ((dict,), "a map"), "list": ((list,), "a list"),
}  # fmt: skip

# Keys that are arguments of our trainers by another name.
_RENAMED = {
    "max_epochs": "epochs",
    "max_train_steps": "max_steps",
    "seed": "seed",
    "tracing_from_weights": "init_from",
    "optimizer.clip_gnorm": "max_grad_norm",
    "checkpoint.save_dir": "save_dir",
    "checkpoint.every_n_train_steps": "save_steps",
    "checkpoint.keep_last_n_checkpoints": "save_total_limit",
    "dataset_sampler.train_args.shuffle": "shuffle",
    "dataloader.train_args.num_workers": "num_workers",
    "dataloader.train_args.pin_memory": "pin_memory",
    "dataloader.train_args.prefetch_factor": "prefetch_factor",
    "dataloader.train_args.drop_last": "drop_last",
    "dataloader.train_args.collate_fn": "data_collator",
}
_UNTRACED = "the model runs unchanged: nothing is traced, and no code is generated."
_SHARDS = "`omnitrain launch --fsdp` (or --zero 1, 2 or 3) shards the run, with AccelerateTrainer."
# What to do instead of setting a key that has no counterpart.
_UNSUPPORTED: dict[str, str] = {
    key: remedy
    for keys, remedy in {
        "gen_savedir gen_reuse broadcast_strategy instance_name dummy_sample_gen_fn dummy_sample_post_process_fn "
        "compute_config.constant_folding compute_config.trace_strategy compute_config.inference_only "
        "compute_config.pas_config compute_config.user_config": _UNTRACED,
        "pas_policy": f"{_UNTRACED} {_SHARDS}",
        "init_module": "import it in the module of the model, which is imported first.",
        "init_env_fn": "there is no call before the model is made. Do it at the top of the model's module; `seed`, "
        "`deterministic` and `matmul_precision` of the trainer may be what it is for.",
        "max_val_steps": "every evaluation is over the entire set. Wrap the dataset into omnitrain.EvalSet(data, "
        "subset=...), which counts samples.",
        "log_progress_every_n_train_steps": "it has no effect with a progress bar, in nnScaler too. Rows are logged at "
        "`log_steps`.",
        "compute_config.zero_ngroups compute_config.zero_use_reduce_scatter compute_config.zero_param_level_sharding":
            _SHARDS,
        "compute_config.use_zero": "`omnitrain launch --fsdp` shards weights, gradients and moments; `--zero 1` only "
        "the moments, by DeepSpeed.",
        "compute_config.use_async_reducer": "gradients are averaged while the backward pass makes them.",
        "compute_config.reducer_bucket_cap_mb": "PyTorch's default of 25 MB holds.",
        "model.parallel_modules": f"the entire model is sharded. {_SHARDS}",
        "optimizer.param_clss_fn": "PyTorch decides which gradients are sent together. `param_groups` of the trainer "
        "gives parameters their own options.",
        "optimizer.grad_reduce_divisor": "gradients are averaged by PyTorch.",
        "optimizer.aggregate_outputs_fn": "it is never called. Losses are averaged by samples or labels; where only "
        "the forward pass knows the number of tokens, write a `unit` that returns (sum of losses, number of tokens), "
        "in place of the one here.",
        "dataset_sampler.train_args.seed": "the order follows from `seed` of the trainer.",
        "dataset_sampler.train_args.drop_last": "each sample is read once, whatever the number of processes: none is "
        "dropped or repeated.",
        "dataset_sampler.val_args dataset_sampler.test_args": "evaluations read each sample once, in order.",
        "dataset_sampler.train_args.dataset dataset_sampler.train_args.num_replicas dataset_sampler.train_args.rank "
        "dataloader.train_args.dataset dataloader.train_args.sampler": "it has no effect in nnScaler either.",
        "checkpoint.format checkpoint.serializer checkpoint.save_type": "checkpoints have one format, of safetensors "
        "and JSON, for any number of processes.",
        "checkpoint.symlink_best_and_last": "`best` and `last` are small files that name a checkpoint.",
        "checkpoint.resume_from.convert_fn": "weights are converted by `init_from: {path: ..., convert: ...}`.",
        "checkpoint.resume_from.with_merged": "any number of processes reads any checkpoint.",
        "debug.check_gradient_sync_cross_devices": "gradients are averaged by PyTorch, and not compared again.",
    }.items()
    for key in keys.split()
}  # fmt: skip

# Hooks that get fewer arguments than in nnScaler.
_FEWER_ARGUMENTS = {"on_step_end": "trainer, epoch, idx", "before_log_train_metrics": "trainer, step_metrics"}
_HOOKS = [name for name in vars(TrainHook) if not name.startswith("_")]

_DATA_LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_SAMPLER = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
# Arguments of a DataLoader that our trainers do not have.
_LOADER_ONLY = ("timeout", "worker_init_fn", "multiprocessing_context", "generator", "pin_memory_device", "in_order")
_DATASETS = {"train": "train", "val": "eval", "test": "test"}
_MODULE = "omnitrain.contrib.nnscaler"
_TENSORS = {"param": "parameters", "buffer": "buffers", "input": "inputs"}
_BUILTIN_TYPES: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float, "bool": bool}

_REFERENCE = re.compile(r"(?<!\$)\$(!?)(?:\{([^}]+)\}|\(([^)]+)\))")


def convert(values: Mapping[str, Any] | Tree) -> tuple[dict[str, Any], list[str]]:
    """Return our configuration for one of nnScaler's, and a line for each key without counterpart.

    The line has the key and its replacement.

    >>> config, notes = convert({
    ...     "model": {"type": "my.Net"}, "dataset": {"type": "my.Rows"}, "max_epochs": 2, "gen_reuse": "auto",
    ...     "optimizer": {"type": "torch.optim.Adam", "args": {"lr": "1e-3"}},
    ... })
    >>> config["trainer"]["optimizer"]
    {'class_path': 'torch.optim.Adam', 'init_args': {'lr': 0.001}}
    >>> notes
    ['`gen_reuse`: the model runs unchanged: nothing is traced, and no code is generated.']

    Args:
        values: The values of nnScaler's file, as a dict or as it was read.

    Raises:
        ConfigError: If a key is unknown to nnScaler, a value wrong, or two contradict each other.
    """
    return _Conversion(values if isinstance(values, Tree) else Tree(dict(values))).result()


# --- references


def _translate(tree: Tree, value: Any, key: tuple[Any, ...], objects: list[str]) -> Any:
    """Return a value with references in our syntax; the names of those to objects are added to `objects`."""
    if isinstance(value, Mapping):
        return {name: _translate(tree, entry, (*key, name), objects) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_translate(tree, entry, (*key, number), objects) for number, entry in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match[2] or match[3]
        if match[1] and match[0] != value:
            return match[0]  # only a full value is an object
        if match[1] and not name.startswith("vars."):
            raise tree.error(
                key, f"{value!r} refers to an object, which must be in `vars`. Pass the values that are needed one by "
                "one: '$(micro_batch_size)'."
            )  # fmt: skip
        if match[1]:
            objects.append(name)
        is_variable = name.isidentifier() and name not in tree.values  # nnScaler looks into the file first, too
        return f"${{{'env:' * is_variable}{name}}}"

    text = _REFERENCE.sub(replace, value)
    if r"$\{" in text or "$${" in text:
        raise tree.error(key, f"{value!r} has a literal '${{', which begins a reference here. Change it.")
    return text.replace(r"$\(", "$(").replace("$$(", "$(")


# --- values


def _parse_literal(value: Any) -> Any:
    """Return an argument as nnScaler reads it: strings that are literals of Python are evaluated."""
    if isinstance(value, dict):
        if value.keys() == {"__value_type", "value"}:
            return value
        keys = {key: _parse_literal(key) for key in value}
        return {
            key if isinstance(keys[key], list | dict) else keys[key]: _parse_literal(entry)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_parse_literal(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    try:
        return _to_plain(ast.literal_eval(value), value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return value


def _to_plain(literal: Any, text: str) -> Any:
    """Return a literal as values that a file can have, or else as a string."""
    if isinstance(literal, tuple | list | set):
        return [_to_plain(entry, repr(entry)) for entry in literal]
    if isinstance(literal, dict):
        return {key: _to_plain(entry, repr(entry)) for key, entry in literal.items()}
    return literal if literal is None or isinstance(literal, bool | int | float | str) else text


def _convert_value(value: Any, where: str) -> Any:
    """Return an argument with objects and functions in our syntax."""
    if isinstance(value, list):
        return [_convert_value(entry, f"{where}.{number}") for number, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.keys() & {"class_path", "import_path"}:
        raise ConfigError(
            f"`{where}` is a map with the key 'class_path' or 'import_path', which describes an object here. Write the "
            "converted file by hand at this place."
        )
    if "__type" in value:
        rest = {key: entry for key, entry in value.items() if key != "__type"}
        return _describe_call(value["__type"], rest, where)
    if "__value_type" not in value:
        return {key: _convert_value(entry, f"{where}.{key}") for key, entry in value.items()}
    kind, value = str(value["__value_type"]), _convert_value(value.get("value"), f"{where}.value")
    if kind == "function":
        return {"import_path": value}
    if kind in _BUILTIN_TYPES and not (isinstance(value, str) and "${" in value) and not isinstance(value, dict | list):
        with contextlib.suppress(TypeError, ValueError):
            return _BUILTIN_TYPES[kind](value)
    target = kind if "." in kind else f"builtins.{kind}"
    return _describe_call(f"{_MODULE}.of_value", {}, where, {"type": {"import_path": target}, "value": value})


def _describe_call(
    path: Any, arguments: Mapping[Any, Any], where: str, converted: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the description of an object that a call returns; `converted` arguments are in our syntax already."""
    for key in arguments:
        if not isinstance(key, str):
            raise ConfigError(f"`{where}` must have names of arguments as keys, got {key!r}.")
    init_args = {key: _convert_value(value, f"{where}.{key}") for key, value in arguments.items()}
    init_args |= converted or {}
    return {"class_path": path, "init_args": init_args} if init_args else {"class_path": path}


def _coerce(value: Any, kind: str, where: str) -> Any:
    """Return a value in the type of its key; nnScaler reads strings as numbers and so on, too."""
    if not kind:
        return value
    value, (types, expected) = _parse_literal(value), _TYPES[kind]
    if int in types and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_wrong = isinstance(value, bool) and kind != "bool"
    if is_wrong or not isinstance(value, types) or (kind == "count" and value < 1):
        raise ConfigError(f"`{where}` must be {expected}, got {value!r:.200}.")
    return value


# --- the conversion


class _Conversion:
    """The conversion of one file."""

    def __init__(self, tree: Tree) -> None:
        objects: list[str] = []
        linked = Tree(_translate(tree, tree.values, (), objects), tree.locations)
        linked.resolve(keep=("vars.", "env:"))
        plain = Tree(linked.values, tree.locations)
        plain.resolve(keep=("env:",))
        self._plain: dict[str, Any] = {}  # the values by dotted key, without references to `vars`
        self._written: dict[str, Any] = {}  # with them, as the converted file has them
        self.trainer: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        shared = [name for name, count in Counter(objects).items() if count > 1]
        self.notes = [f"`{name}`: each place that refers to it gets its own object." for name in shared]
        self._read_section("", plain.values, linked.values)

    def result(self) -> tuple[dict[str, Any], list[str]]:
        self._compute()
        self._model_and_optimizer()
        self._data()
        for key, remedy in _UNSUPPORTED.items():
            if self.get(key) not in (None, False, "", {}, [], 0):
                self.note(key, remedy)
        for key, argument in _RENAMED.items():
            if key in self._plain and (self.get(key) or not key.startswith(("max_", "optimizer."))):
                self.trainer[argument] = _convert_value(self._written[key], key)
        self._evaluations()
        self._checkpoints()
        self._precision()
        self._reports()
        free = _convert_value(_parse_literal(self._written.get("vars") or {}), "vars")
        parts = {"vars": free, "trainer": self.trainer, "train": self.train}
        return {name: part for name, part in parts.items() if part}, self.notes

    def note(self, key: str, remedy: str) -> None:
        self.notes.append(f"`{key}`: {remedy}")

    # --- the values of the file

    def _read_section(self, name: str, plain: Any, linked: Any) -> None:
        is_hooks = name == "hook" and "type" not in plain
        kinds = dict.fromkeys((*_HOOKS, *UNSUPPORTED_HOOKS), "") if is_hooks else _KEYS[name.partition("[")[0]]
        for key, value in plain.items():
            where = f"{name}.{key}" if name else key
            if key not in kinds:
                hint = "" if len(kinds) > 20 else f" `{name}` has {', '.join(kinds)}."
                raise ConfigError(f"`{where}` is no key of nnScaler.{did_you_mean(str(key), kinds)}{hint}")
            if value is None:
                continue
            value = self._plain[where] = _coerce(value, kinds[key], where)
            text = linked[key] if isinstance(linked, dict) else value
            is_linked = isinstance(text, type(value)) if isinstance(value, dict | list) else "${" in str(text)
            self._written[where] = text if is_linked else value
            for number, entry in enumerate(value if key == "log" else ()):
                self._read_section(f"log[{number}]", entry, self._written["log"][number])
            is_own = where.endswith("_args") and plain.get("type", _DATA_LOADER[0]) not in (*_DATA_LOADER, *_SAMPLER)
            if isinstance(value, dict) and where in _KEYS and not is_own:
                parse = _parse_literal if where.endswith("_args") else dict
                self._read_section(where, parse(value), parse(self._written[where]))

    def get(self, key: str, default: Any = None) -> Any:
        return self._plain.get(key, default)

    def arguments(self, key: str) -> dict[str, Any]:
        """Return the arguments of a call, as nnScaler guesses their types."""
        return _parse_literal(self._written.get(key, {}))

    def call(self, section: str, key: str = "args") -> dict[str, Any]:
        if not self.get(f"{section}.type"):
            raise ConfigError(f"`{section}.type` is missing: the name of a class or function, such as 'my.Thing'.")
        return _describe_call(self.get(f"{section}.type"), self.arguments(f"{section}.{key}"), f"{section}.{key}")

    # --- processes, model and optimizer

    def _compute(self) -> None:
        self.processes, plan = self.get("compute_config.runtime_ngpus"), self.get("compute_config.plan_ngpus", 1)
        self.replicas = self.processes // plan if self.processes else None
        self.trainer["class_path"] = "Trainer" if self.processes == 1 else "AccelerateTrainer"
        if plan > 1:
            self.note("compute_config.plan_ngpus", f"a model is not cut into {plan} parts. Each process takes its own "
                      "batches, and `omnitrain launch --fsdp` shards the weights.")  # fmt: skip
        if self.processes:
            self.note("compute_config.runtime_ngpus", f"`omnitrain launch -n {self.processes}` starts the processes.")
        if self.get("run_mode") == "compile":
            self.note("run_mode", "nothing is compiled ahead: start the run.")

    def _model_and_optimizer(self) -> None:
        trainer = self.trainer
        trainer["model"] = self.call("model")
        trainer["unit"] = {"class_path": "omnitrain.model.units.WholeBatchUnit"}
        trainer["optimizer"] = self.call("optimizer")
        trainer["max_grad_norm"] = None
        reduction = self.get("optimizer.grad_reduction", "mean")
        if reduction != "mean":
            trainer["grad_reduction"] = reduction
        if self.get("optimizer.loss_reduction", "mean") != reduction:
            self.note("optimizer.loss_reduction", "the loss in the logs is always the mean.")
        if self.get("lr_scheduler"):
            trainer["lr_scheduler"] = self.call("lr_scheduler")
            trainer["scheduler_interval"] = self.get("lr_scheduler.interval", "epoch")
        if not self.get("max_epochs") and not self.get("max_train_steps"):
            raise ConfigError("`max_epochs` or `max_train_steps` is missing, of which nnScaler needs one. Write one.")

    # --- data

    def _data(self) -> None:
        sampler_type = self.get("dataset_sampler.type", _SAMPLER[0])
        loader_type = self.get("dataloader.type", _DATA_LOADER[0])
        options: dict[str, dict[str, Any]] = {}
        for stage in _DATASETS:
            options[stage] = self._stage_arguments("dataloader", stage, ("dataset", "sampler", "shuffle"))
            if isinstance(collate := options[stage].get("collate_fn"), str):
                options[stage]["collate_fn"] = {"__value_type": "function", "value": collate}
        is_known = loader_type in _DATA_LOADER
        has_loader = (
            not is_known or sampler_type not in _SAMPLER or any(name in _LOADER_ONLY for name in options["train"])
        )
        if has_loader:
            key = "dataset_sampler.type" if is_known and sampler_type not in _SAMPLER else "dataloader"
            self.note(key, "the loader is built as in nnScaler and used unchanged: each of n processes takes every "
                      "n-th of its batches, so neither it nor its dataset may split the data by rank.")  # fmt: skip
        for stage, arguments in options.items():
            if stage != "train" and not self.get(f"dataset.{stage}_args"):
                continue  # nnScaler builds the other sets only if they have arguments
            data, name = self.call("dataset", f"{stage}_args"), _DATASETS[stage]
            differs = arguments.get("collate_fn") != options["train"].get("collate_fn")
            if has_loader or differs or not arguments.keys().isdisjoint(_LOADER_ONLY):
                self.trainer[f"{name}_loader"] = self._loader(loader_type, sampler_type, stage, data, arguments)
            else:
                self.trainer[f"{name}_dataset"] = data
        if has_loader:  # their arguments are those of the loader
            sections = ("dataloader.", "dataset_sampler.")
            self._plain = {key: value for key, value in self._plain.items() if not key.startswith(sections)}
        elif collate := options["train"].get("collate_fn"):
            self._written["dataloader.train_args.collate_fn"] = collate
        if self.get("dataloader.train_args.persistent_workers") is False:
            self.note("dataloader.train_args.persistent_workers", "workers are kept for the entire run.")
        self._batches(has_loader)

    def _stage_arguments(self, section: str, stage: str, without: tuple[str, ...]) -> dict[str, Any]:
        """Return the arguments of a loader or a sampler for a stage, by default those for training."""
        key = f"{section}.{stage}_args"
        arguments = self.arguments(key if self.get(key) else f"{section}.train_args")
        return {name: value for name, value in arguments.items() if name not in without}

    def _loader(self, loader: str, sampler: str, stage: str, data: Any, options: dict[str, Any]) -> dict[str, Any]:
        arguments = self._stage_arguments("dataset_sampler", stage, ("dataset", "num_replicas", "rank"))
        if sampler in _SAMPLER:
            arguments = {"shuffle": stage == "train", **(arguments if stage == "train" else {})}
        converted: dict[str, Any] = {
            "loader": {"import_path": loader},
            "dataset": data,
            "batch_size": self._written["micro_batch_size"] if self.get("micro_batch_size") else 1,
            "sampler_args": _convert_value(arguments, "dataset_sampler"),
        }
        if self.get("dataset_sampler.type") or self.get("dataset_sampler.train_args"):
            converted["sampler"] = {"import_path": sampler}
        return _describe_call(f"{_MODULE}.make_loader", options, "dataloader", converted)

    def _batches(self, has_loader: bool) -> None:
        """Convert the sizes of batches; with a custom loader, gradients are accumulated over all processes."""
        total, accumulation = self.get("global_batch_size"), self.get("grad_accumulation_steps") or 1
        micro, replicas = self.get("micro_batch_size", 1), (self.processes if has_loader else self.replicas) or 1
        product = micro * replicas * accumulation
        needs_processes = has_loader and not self.processes
        if total and (total % product or needs_processes):
            remedy = "Write `compute_config.runtime_ngpus`." if needs_processes else "Make it a multiple of that."
            raise ConfigError(
                f"`global_batch_size` is {total}, and `micro_batch_size` x replicas x `grad_accumulation_steps` is "
                f"{micro} x {replicas} x {accumulation} = {product}. {remedy}"
            )
        if has_loader:
            steps = total // (micro * replicas) if total else accumulation
            self.trainer |= {"gradient_accumulation_steps": steps} if steps != 1 else {}
            return
        self.trainer["batch_size"] = self._written["micro_batch_size"] if self.get("micro_batch_size") else 1
        if total:
            self.trainer["global_batch_size"] = self._written["global_batch_size"]
        elif self.replicas != self.processes:
            self.trainer["global_batch_size"] = product
        elif accumulation > 1:
            self.trainer["gradient_accumulation_steps"] = self._written["grad_accumulation_steps"]

    # --- evaluations and files

    def _evaluations(self) -> None:
        """Convert the intervals of evaluations; nnScaler evaluates before each save too, to score the checkpoint."""
        if "eval_dataset" not in self.trainer and "eval_loader" not in self.trainer:
            return
        steps, epochs = ["val_every_n_train_steps"], [self.get("val_every_n_epochs", 1)]
        if not self.get("checkpoint.no_save"):
            save_steps, save_epochs = "checkpoint.every_n_train_steps", self.get("checkpoint.every_n_epochs")
            steps.insert(0, save_steps)
            epochs.insert(0, save_epochs or int(not self.get(save_steps)))
        intervals = [self._written[key] for key in steps if self.get(key)] + [
            f"{number}ep" for number in epochs if number
        ]
        intervals = list(dict.fromkeys(intervals))
        if intervals not in ([], ["1ep"]):
            self.trainer["eval_steps"] = intervals if intervals[1:] else intervals[0]

    def _checkpoints(self) -> None:
        where = "checkpoint.resume_from"
        source = self.get(where)
        if isinstance(source, dict):
            source = self.get(f"{where}.checkpoint", "last")
        if source == "best":
            self.train["resume_from"] = "best"
            self.note(where, "a run without a best checkpoint is an error here, not a fresh start.")
        elif source == "last":
            self.train["resume_from"] = "auto"  # starts afresh without a checkpoint, as nnScaler does
        elif source is not None:
            linked = self._written.get(f"{where}.checkpoint", self._written[where])
            self.train["resume_from"] = _convert_value(_parse_literal(linked), where)
            self.note(where, "it must be a checkpoint of omnitrain. For weights of nnScaler, merge them with its "
                      "Trainer.merge_checkpoint, and pass the file as `init_from` of the trainer.")  # fmt: skip
        if self.get("checkpoint.no_save"):
            for name in ("save_dir", "save_steps", "save_total_limit"):
                self.trainer.pop(name, None)
            return
        self.trainer.setdefault("save_dir", "./checkpoints")
        if (epochs := self.get("checkpoint.every_n_epochs") or 1) > 1:
            self.trainer["save_steps"] = f"{epochs}ep"
        if self.get("checkpoint.save_best") is False:
            self.trainer["keep_best"] = 0
        if self.get("checkpoint.save_last") is False:
            self.note("checkpoint.save_last", "`last` always names the newest checkpoint, which takes no space.")

    def _precision(self) -> None:
        precision = self.get("precision") or {}
        if isinstance(precision, str):
            precision = dict.fromkeys(_TENSORS, precision)
        dtypes = _coerce(precision, "map", "precision").items()
        dtypes = {_TENSORS.get(name, name): dtype for name, dtype in dtypes if dtype != "none"}
        if dtypes.get("parameters") == "fp16":
            self.trainer["autocast"] = "fp16"
            dtypes = {name: dtype for name, dtype in dtypes.items() if dtype != "fp16"}
            self.note("precision", "parameters of fp16 do not train: they keep their dtype, and the forward pass is in "
                      "fp16 by `autocast`, with a scaled loss. 'bf16' is converted unchanged.")  # fmt: skip
        if dtypes:
            self.trainer["dtypes"] = dtypes

    # --- reports

    def _reports(self) -> None:
        loggers = [self._logger(f"log[{number}]") for number in range(len(self.get("log", [])))]
        hooks = self._hooks() if self.get("hook") else None
        if hooks:
            self.trainer["callbacks"] = [{"class_path": "HookCallback", "init_args": {"hooks": hooks}}]
        if any(loggers):
            self.trainer["loggers"] = [logger for logger in loggers if logger]
        if self.get("enable_progress_bar") is False:
            self.trainer["progress_bar"] = False
            self.note("enable_progress_bar", "false prints nothing. Leave `progress_bar` out for plain lines wherever "
                      "there is no terminal, at `log_steps`.")  # fmt: skip

    def _logger(self, name: str) -> dict[str, Any] | None:
        target, arguments = str(self.get(f"{name}.type")), self.arguments(f"{name}.args")
        kind = target.rpartition(".")[2]
        if target != kind and not target.startswith("nnscaler."):
            self.note(name, f"{target} is written for nnScaler. Write a Callback with `on_log(trainer, logs)`, and "
                      "name it in `callbacks`; `loggers` has names of services.")  # fmt: skip
            return None
        if kind == "TensorBoardLogger":
            for key in sorted(arguments.keys() - {"root_dir", "name"}):
                self.note(f"{name}.args.{key}", "TensorBoardLogger takes only `log_dir` and `every`.")
            folder = "/".join(str(arguments[key]) for key in ("root_dir", "name") if arguments.get(key))
            arguments = {"log_dir": folder} if folder else {}
        return _describe_call(kind, arguments, f"{name}.args")

    def _hooks(self) -> dict[str, Any]:
        """Return the description of a hook class, or functions by name."""
        if self.get("hook.type"):
            self.note("hook.type", "derive it from omnitrain.TrainHook, which has the same methods. Arguments are "
                      "passed by name, not as one dict.")  # fmt: skip
            return self.call("hook")
        functions: dict[str, Any] = {}
        for name in self.get("hook"):
            function = self.get(f"hook.{name}")
            if name in UNSUPPORTED_HOOKS and function is not None:
                self.note(f"hook.{name}", f"it is never called: {UNSUPPORTED_HOOKS[name]}.")
            elif function is not None:
                functions[name] = {"import_path": function}
                if name in _FEWER_ARGUMENTS:
                    self.note(f"hook.{name}", f"it is called with {_FEWER_ARGUMENTS[name]} here.")
        return functions


# --- functions for converted files


def of_value(type: Callable[[Any], Any], value: Any) -> Any:
    """Return `type(value)`: nnScaler's `__value_type` and `value`.

    >>> of_value(set, [1, 1])
    {1}
    """
    return type(value)


def make_loader(
    loader: Callable[..., Any],
    dataset: Any,
    batch_size: int,
    sampler: Callable[..., Any] | None = None,
    sampler_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Build a loader as nnScaler does: from the dataset, the batch size and a sampler, which a stream does not have.

    The sampler is for one process: each process of a run takes its share of the loader's batches.
    """
    from torch.utils.data import DistributedSampler, IterableDataset

    if not isinstance(dataset, IterableDataset):
        make = DistributedSampler if sampler is None else sampler
        options["sampler"] = make(**{**(sampler_args or {}), "dataset": dataset, "num_replicas": 1, "rank": 0})
    elif sampler is not None:
        raise ConfigError(
            f"`dataset_sampler` has no effect on {type(dataset).__name__}, a stream, which has its own order. "
            "Leave it out."
        )
    return loader(dataset=dataset, batch_size=batch_size, **options)
