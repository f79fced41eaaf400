"""Conversion of nnScaler's configuration files.

`convert` maps plain values to plain values and imports nothing. Converted files call the functions at the end of the
module where a class and its arguments are not enough.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omnitrain.callbacks.train_hook import TrainHook
from omnitrain.core.errors import ConfigError, did_you_mean

_TEXT, _INTEGER, _NUMBER, _BOOL, _MAP, _LIST, _ANY = "text", "integer", "number", "bool", "map", "list", "any"
_EXPECTED = {
    _TEXT: "a string",
    _INTEGER: "an integer",
    _NUMBER: "a number",
    _BOOL: "true or false",
    _MAP: "a map",
    _LIST: "a list",
}
_STAGE_KEYS = {"type": _TEXT, "train_args": _MAP, "val_args": _MAP, "test_args": _MAP}
# nnScaler's keys by section, and the type of each; any other key is an error in nnScaler too.
_KEYS: dict[str, dict[str, str]] = {
    "": {
        "init_module": _TEXT, "vars": _MAP, "compute_config": _MAP, "gen_savedir": _TEXT, "gen_reuse": _TEXT,
        "pas_policy": _TEXT, "broadcast_strategy": _TEXT, "instance_name": _ANY, "run_mode": _TEXT,
        "dummy_sample_gen_fn": _TEXT, "tracing_from_weights": _TEXT, "model": _MAP, "optimizer": _MAP,
        "dataset": _MAP, "dataloader": _MAP, "dataset_sampler": _MAP, "lr_scheduler": _MAP, "checkpoint": _MAP,
        "log": _LIST, "hook": _MAP, "debug": _MAP, "precision": _ANY, "micro_batch_size": _INTEGER,
        "global_batch_size": _INTEGER, "grad_accumulation_steps": _INTEGER, "max_epochs": _INTEGER,
        "max_train_steps": _INTEGER, "max_val_steps": _INTEGER, "val_every_n_train_steps": _INTEGER,
        "val_every_n_epochs": _INTEGER, "enable_progress_bar": _BOOL, "log_progress_every_n_train_steps": _INTEGER,
        "seed": _INTEGER, "init_env_fn": _TEXT, "dummy_sample_post_process_fn": _TEXT,
    },
    "compute_config": {
        "plan_ngpus": _INTEGER, "runtime_ngpus": _INTEGER, "constant_folding": _BOOL, "trace_strategy": _TEXT,
        "use_zero": _ANY, "zero_ngroups": _INTEGER, "zero_use_reduce_scatter": _BOOL,
        "zero_param_level_sharding": _BOOL, "inference_only": _BOOL,
        "use_end2end": _BOOL, "use_async_reducer": _BOOL, "reducer_bucket_cap_mb": _NUMBER, "pas_config": _MAP,
        "user_config": _MAP,
    },
    "model": {"type": _TEXT, "args": _MAP, "parallel_modules": _LIST},
    "optimizer": {
        "type": _TEXT, "args": _MAP, "clip_gnorm": _NUMBER, "loss_reduction": _TEXT, "grad_reduction": _TEXT,
        "aggregate_outputs_fn": _TEXT, "param_clss_fn": _TEXT, "grad_reduce_divisor": _NUMBER,
    },
    "dataset": _STAGE_KEYS,
    "dataloader": _STAGE_KEYS,
    "dataset_sampler": _STAGE_KEYS,
    "lr_scheduler": {"type": _TEXT, "args": _MAP, "interval": _TEXT},
    "checkpoint": {
        "save_dir": _TEXT, "no_save": _BOOL, "format": _TEXT, "serializer": _ANY,
        "save_type": _TEXT, "save_last": _BOOL, "save_best": _BOOL,
        "symlink_best_and_last": _BOOL, "every_n_train_steps": _INTEGER, "every_n_epochs": _INTEGER,
        "keep_last_n_checkpoints": _INTEGER, "resume_from": _ANY,
    },
    "checkpoint.resume_from": {"checkpoint": _ANY, "convert_fn": _TEXT, "with_merged": _BOOL, "save_memory": _BOOL},
    "log": {"type": _TEXT, "args": _MAP},
    "hook": {"type": _TEXT, "args": _MAP},
    "debug": {"check_gradient_sync_cross_devices": _BOOL},
}  # fmt: skip

_UNTRACED = "the model runs unchanged: nothing is traced, and no code is generated."
_SHARDS = "`omnitrain launch --fsdp` (or --zero 1, 2 or 3) shards the run, with AccelerateTrainer."
# Keys without counterpart, and their replacement.
_UNSUPPORTED: dict[str, str] = {
    "init_module": "import it in the module of the model, which is imported first.",
    "gen_savedir": _UNTRACED,
    "gen_reuse": _UNTRACED,
    "pas_policy": f"{_UNTRACED} {_SHARDS}",
    "broadcast_strategy": _UNTRACED,
    "instance_name": _UNTRACED,
    "dummy_sample_gen_fn": _UNTRACED,
    "dummy_sample_post_process_fn": _UNTRACED,
    "init_env_fn": "there is no call before the model is made. Do it at the top of the model's module; `seed`, "
    "`deterministic` and `matmul_precision` of the trainer may be what it is for.",
    "compute_config.constant_folding": _UNTRACED,
    "compute_config.trace_strategy": _UNTRACED,
    "compute_config.inference_only": _UNTRACED,
    "compute_config.pas_config": _UNTRACED,
    "compute_config.user_config": _UNTRACED,
    "compute_config.zero_ngroups": _SHARDS,
    "compute_config.zero_use_reduce_scatter": _SHARDS,
    "compute_config.zero_param_level_sharding": _SHARDS,
    "compute_config.use_async_reducer": "gradients are averaged while the backward pass makes them.",
    "compute_config.reducer_bucket_cap_mb": "PyTorch's default of 25 MB holds.",
    "model.parallel_modules": f"the entire model is sharded. {_SHARDS}",
    "optimizer.param_clss_fn": "PyTorch decides which gradients are sent together. `param_groups` of the trainer gives "
    "parameters their own options.",
    "optimizer.grad_reduce_divisor": "gradients are averaged by PyTorch.",
    "checkpoint.format": "checkpoints have one format, of safetensors and JSON.",
    "checkpoint.serializer": "checkpoints have one format, of safetensors and JSON.",
    "checkpoint.symlink_best_and_last": "`best` and `last` are small files that name a checkpoint.",
    "debug.check_gradient_sync_cross_devices": "gradients are averaged by PyTorch, and not compared again.",
}

# Hooks that are not called here, and their replacement.
_NEVER_CALLED = {
    "after_aggregate_train_step_outputs": "use before_log_train_metrics, or on_train_step_end for this rank's outputs",
    "after_aggregate_val_step_outputs": "use on_val_end, or on_val_step_end for this rank's outputs",
    "on_expire_checkpoint": "copy what is to be kept in on_save_checkpoint: nothing is called before one is deleted",
    "before_sync_grad": "use after_sync_grad: gradients are averaged while the backward pass makes them",
}
# Hooks that get fewer arguments than in nnScaler.
_FEWER_ARGUMENTS = {
    "on_step_end": "it is called with trainer, epoch, idx",
    "before_log_train_metrics": "it is called with trainer, step_metrics",
}
_HOOKS = [name for name in vars(TrainHook) if not name.startswith("_")]

_DATA_LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_SAMPLER = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
# Arguments of a DataLoader that our trainers have too, or do not need.
_LOADING = ("num_workers", "pin_memory", "prefetch_factor", "drop_last", "collate_fn", "persistent_workers", "shuffle")
_LOADER_ONLY = ("timeout", "worker_init_fn", "multiprocessing_context", "generator", "pin_memory_device", "in_order")
_SAMPLER_ARGUMENTS = ("dataset", "num_replicas", "rank")
_DATASETS = {"train": "train", "val": "eval", "test": "test"}
_MODULE = "omnitrain.contrib.nnscaler"
_DTYPES = ("fp32", "fp16", "bf16", "none")
_TENSORS = {"param": "parameters", "buffer": "buffers", "input": "inputs"}
_BUILTIN_TYPES: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float, "bool": bool}

_REFERENCE = re.compile(r"(?<!\$)\$(?:\{([^}]+)\}|\(([^)]+)\))")
_OBJECT_REFERENCE = re.compile(r"\$!(?:\(([^)]+)\)|\{([^}]+)\})")


def convert(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
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
        values: The values of nnScaler's file, with the changes of its command line.

    Raises:
        ConfigError: If a key is unknown to nnScaler, a value wrong, or two contradict each other.
    """
    return _Conversion(values).result()


# --- references


class _References:
    """References between the values of a file.

    Args:
        tree: The values of the file.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree
        self.objects: dict[str, int] = {}  # how often each is referred to

    def resolve(self, value: Any, where: str, inline: bool, pending: tuple[str, ...] = ()) -> Any:
        """Return a value with references in our syntax.

        Args:
            value: The value.
            where: Its key.
            inline: Whether to insert values of `vars`; otherwise references to single values are kept.
            pending: The references that led here.

        Raises:
            ConfigError: If one leads nowhere, or into a circle.
        """
        if isinstance(value, Mapping):
            return {key: self.resolve(entry, _join_key(where, key), inline, pending) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolve(entry, _join_key(where, n), inline, pending) for n, entry in enumerate(value)]
        if not isinstance(value, str):
            return value
        if match := _OBJECT_REFERENCE.fullmatch(value):
            return self._object(match[1] or match[2], where, inline, pending)
        if match := _REFERENCE.fullmatch(value):
            return self._target(match[1] or match[2], where, inline, pending)
        text = _REFERENCE.sub(lambda match: str(self._target(match[1] or match[2], where, inline, pending)), value)
        if r"$\{" in text or "$${" in text:
            raise ConfigError(f"`{where}` has a literal '${{' in {value!r}, which begins a reference here. Change it.")
        return text.replace(r"$\(", "$(").replace("$$(", "$(")

    def _target(self, name: str, where: str, inline: bool, pending: tuple[str, ...]) -> Any:
        if name in pending:
            raise ConfigError(f"`{where}` refers to itself: {' -> '.join([*pending, name])}. Write a value in one.")
        try:
            value = self._lookup(name, (*pending, name))
        except LookupError:
            if name.isidentifier():  # nnScaler looks into the file first, too
                return f"${{env:{name}}}"
            raise ConfigError(f"`{where}` refers to {name!r}, and there is no such key.{self._suggest(name)}") from None
        value = self.resolve(value, name, inline, (*pending, name))
        is_single = not isinstance(value, dict | list)
        return f"${{{name}}}" if name.startswith("vars.") and is_single and not inline else value

    def _object(self, name: str, where: str, inline: bool, pending: tuple[str, ...]) -> Any:
        if name != "self" and not name.startswith("vars."):
            raise ConfigError(f"`{where}` refers to {name!r} by '$!'. That must be 'self', or begin with 'vars.'.")
        if name == "self":
            raise ConfigError(
                f"`{where}` asks for nnScaler's full configuration, which does not exist here. Pass the values that "
                "are needed one by one: '$(micro_batch_size)'."
            )
        value = self._target(name, where, inline, pending)
        if inline:
            return value
        self.objects[name] = self.objects.get(name, 0) + 1
        return f"${{{name}}}"

    def _lookup(self, name: str, pending: tuple[str, ...]) -> Any:
        value: Any = self._tree
        for part in name.split("."):
            if isinstance(value, str):  # a map that is a reference itself
                value = self.resolve(value, name, inline=True, pending=pending)
            if isinstance(value, list | tuple) and part.isdigit():
                value = value[int(part)]
            elif isinstance(value, Mapping):
                value = value[part]
            else:
                raise LookupError(name)
        return value

    def _suggest(self, name: str) -> str:
        return did_you_mean(name, list(_iter_names(self._tree)))


def _iter_names(tree: Any, before: str = "") -> Iterable[str]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        yield _join_key(before, key)
        yield from _iter_names(value, _join_key(before, key))


def _join_key(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if part != "")


# --- values


def _parse_literal(value: Any) -> Any:
    """Return an argument as nnScaler reads it: strings that are literals of Python are evaluated."""
    if isinstance(value, dict):
        if value.keys() == {"__value_type", "value"}:
            return value
        return {_parse_key(key): _parse_literal(entry) for key, entry in value.items()}
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


def _parse_key(key: Any) -> Any:
    literal = _parse_literal(key)
    return key if isinstance(literal, list | dict) else literal


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
        return [_convert_value(entry, _join_key(where, number)) for number, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.keys() & {"class_path", "import_path"}:
        raise ConfigError(
            f"`{where}` is a map with the key 'class_path' or 'import_path', which describes an object here. Write the "
            "converted file by hand at this place."
        )
    if "__type" in value:
        rest = {key: entry for key, entry in value.items() if key != "__type"}
        return _describe_call(_name(value["__type"], f"{where}.__type"), rest, where)
    if "__value_type" not in value:
        return {key: _convert_value(entry, _join_key(where, key)) for key, entry in value.items()}
    if "value" not in value:
        raise ConfigError(f"`{where}` has '__value_type' and no 'value'. Write both, or '__type'.")
    kind = _name(value["__value_type"], f"{where}.__value_type")
    value = _convert_value(value["value"], f"{where}.value")
    if kind == "function":
        return {"import_path": _name(value, f"{where}.value")}
    if kind in _BUILTIN_TYPES and not (isinstance(value, str) and "${" in value) and not isinstance(value, dict | list):
        try:
            return _BUILTIN_TYPES[kind](value)
        except (TypeError, ValueError):
            raise ConfigError(f"`{where}.value` must be of the type {kind}, got {value!r}.") from None
    target = kind if "." in kind else f"builtins.{kind}"
    return {"class_path": f"{_MODULE}.of_value", "init_args": {"type": {"import_path": target}, "value": value}}


def _describe_call(path: str, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the description of an object that a call returns."""
    _check_names(arguments, where)
    init_args = {key: _convert_value(value, _join_key(where, key)) for key, value in arguments.items()}
    return {"class_path": path, "init_args": init_args} if init_args else {"class_path": path}


def _check_names(arguments: Mapping[Any, Any], where: str) -> None:
    """Raise ConfigError for a key that is no string."""
    for key in arguments:
        if not isinstance(key, str):
            raise ConfigError(f"`{where}` must have names of arguments as keys, got {key!r}.")


def _name(value: Any, where: str) -> str:
    """Return the dotted name of a class or function."""
    is_name = isinstance(value, str) and ("${" in value or all(part.isidentifier() for part in value.split(".")))
    if not is_name:
        raise ConfigError(f"`{where}` must be the name of a class or function, such as 'my.Net', got {value!r}.")
    return value


def _coerce(value: Any, kind: str, where: str) -> Any:
    """Return a value converted to the type of its key, as nnScaler does.

    Raises:
        ConfigError: If it does not fit.
    """
    wrong = ConfigError(f"`{where}` must be {_EXPECTED.get(kind, '')}, got {value!r:.200}.")
    if kind == _ANY:
        return value
    if kind in (_MAP, _LIST):
        value = _parse_literal(value) if isinstance(value, str) else value
        if not isinstance(value, dict if kind == _MAP else list):
            raise wrong
        return value
    if isinstance(value, dict | list):
        raise wrong
    if kind == _TEXT:
        return str(value)
    if isinstance(value, str) and "${env:" in value:
        raise ConfigError(
            f"`{where}` is read from the environment, and what it becomes here depends on it. Write a number, and "
            f"{value!r} into the converted file."
        )
    if kind == _BOOL:
        words = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() not in words:
            raise wrong
        return words[str(value).lower()]
    try:
        if isinstance(value, bool) or (kind == _INTEGER and float(value) != int(float(value))):
            raise wrong
        return int(float(value)) if kind == _INTEGER else float(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None


class _Section:
    """The keys of one section.

    Args:
        name: Its name; "" is the file itself.
        plain: Its values, with all references resolved.
        linked: Its values, with references to `vars`.
        kinds: Its keys, with their types.

    Raises:
        ConfigError: If a key is unknown, or a value is of another type.
    """

    def __init__(self, name: str, plain: Any, linked: Any, kinds: Mapping[str, str]) -> None:
        self.name = name
        if not isinstance(plain, dict):
            raise ConfigError(f"`{name or 'the file'}` must be a map of keys and values, got {plain!r:.200}.")
        for key in plain:
            if key not in kinds:
                hint = "" if len(kinds) > 20 else f" `{name}` has {', '.join(kinds)}."
                raise ConfigError(
                    f"`{_join_key(name, key)}` is no key of nnScaler.{did_you_mean(str(key), kinds)}{hint}"
                )
        # nnScaler ignores a key without a value
        self._values = {
            key: _coerce(value, kinds[key], _join_key(name, key)) for key, value in plain.items() if value is not None
        }
        self._linked = {key: linked[key] if isinstance(linked, dict) else value for key, value in plain.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value without references."""
        return self._values.get(key, default)

    def as_written(self, key: str) -> Any:
        """Return a value for the converted file, which keeps references to `vars`."""
        linked = self._linked[key]
        return linked if isinstance(linked, str) and "${" in linked else self._values[key]

    def linked(self, key: str) -> Any:
        """Return a value with its references."""
        return self._linked.get(key)

    def arguments(self, key: str = "args") -> dict[str, Any]:
        """Return the arguments of a call, as nnScaler guesses their types."""
        if key not in self._values:
            return {}
        where = _join_key(self.name, key)
        arguments = _coerce(self._linked[key], _MAP, where)
        _check_names(arguments, where)
        return {name: _parse_literal(value) for name, value in arguments.items()}

    def target(self) -> str:
        """Return the name of the class or function that this section calls."""
        if "type" not in self._values:
            raise ConfigError(f"`{self.name}.type` is missing: the name of a class or function, such as 'my.Thing'.")
        return _name(self._values["type"], f"{self.name}.type")

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """Return the value of a key with a few choices."""
        word = self.get(key, default)
        if word not in choices:
            raise ConfigError(
                f"`{_join_key(self.name, key)}` must be one of {', '.join(choices)}, got {word!r}."
                f"{did_you_mean(word, choices)}"
            )
        return word

    def positive(self, key: str, default: int | None = None) -> int | None:
        """Return a number of at least 1, or None."""
        number = self.get(key, default)
        if number is not None and number < 1:
            raise ConfigError(f"`{_join_key(self.name, key)}` must be at least 1, got {number}. Leave it out instead.")
        return number


# --- the conversion


class _Conversion:
    """The conversion of one file."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"A configuration of nnScaler is a map of keys and values, got {values!r:.200}.")
        references = _References(values)
        self._plain = references.resolve(values, "", inline=True)
        self._linked = references.resolve(values, "", inline=False)
        self.trainer: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        several = [name for name, times in references.objects.items() if times > 1]
        self.notes = [f"`{name}`: each place that refers to it gets its own object." for name in several]
        self.run = self._section("")
        self.checkpoint = self._section("checkpoint")

    def result(self) -> tuple[dict[str, Any], list[str]]:
        """Return our configuration, and the notes."""
        self._compute()
        self._model()
        self._data()
        self._optimization()
        self._length()
        self._checkpoints()
        self._precision()
        self._reports()
        self._section("debug")
        free = _convert_value(self.run.arguments("vars"), "vars")
        parts = {"vars": free, "trainer": self.trainer, "train": self.train}
        return {name: part for name, part in parts.items() if part}, self.notes

    def note(self, key: str, advice: str) -> None:
        """Note the replacement of a key."""
        self.notes.append(f"`{key}`: {advice}")

    def _section(self, name: str, plain: Any = None, linked: Any = None) -> _Section:
        """Return a section of the file, empty if it is missing."""
        if not name:
            plain, linked = self._plain, self._linked
        elif plain is None:
            plain, linked = self.run.get(name, {}), self.run.linked(name)
        section = _Section(name, plain, linked, _KEYS[name.split("[")[0]])
        for key, advice in _UNSUPPORTED.items():
            before, _, last = key.rpartition(".")
            if before == name and section.get(last) not in (None, False, "", {}, []):
                self.note(key, advice)
        return section

    # --- processes and model

    def _compute(self) -> None:
        compute = self._section("compute_config")
        if compute.get("use_end2end") is False:
            raise ConfigError(
                "`compute_config.use_end2end` is false, which nnScaler's trainer does not run either: the model must "
                "take a batch and return its loss. Set it to true."
            )
        self.processes = compute.positive("runtime_ngpus")
        self.plan_ngpus = compute.positive("plan_ngpus", 1) or 1
        if self.processes and self.processes % self.plan_ngpus:
            raise ConfigError(
                f"`compute_config.runtime_ngpus` is {self.processes}, which is no multiple of "
                f"`compute_config.plan_ngpus`, {self.plan_ngpus}. Change one of them."
            )
        self.trainer["class_path"] = "Trainer" if self.processes == 1 else "AccelerateTrainer"
        if self.plan_ngpus > 1:
            self.note(
                "compute_config.plan_ngpus",
                f"a model is not cut into {self.plan_ngpus} parts. Each process takes its own batches, and "
                "`omnitrain launch --fsdp` shards the weights.",
            )
        if self.processes:
            self.note("compute_config.runtime_ngpus", f"`omnitrain launch -n {self.processes}` starts the processes.")
        zero = str(compute.get("use_zero", False)).lower()
        if zero not in ("false", "true", "0", "1", "2", "3"):
            raise ConfigError(f"`compute_config.use_zero` must be true, false, or a stage from 0 to 3, got {zero!r}.")
        if zero not in ("false", "0"):
            self.note("compute_config.use_zero", "`omnitrain launch --fsdp` shards weights, gradients and moments; "
                      "`--zero 1` only the moments, by DeepSpeed.")  # fmt: skip
        if self.run.choice("run_mode", "run", ("run", "compile")) == "compile":
            self.note("run_mode", "nothing is compiled ahead: start the run.")
        self.run.choice("gen_reuse", "auto", ("auto", "match", "override", "moo", "graph"))

    def _model(self) -> None:
        model = self._section("model")
        self.trainer["model"] = _describe_call(model.target(), model.arguments(), "model.args")
        self.trainer["unit"] = {"class_path": "omnitrain.model.units.WholeBatchUnit"}
        if "tracing_from_weights" in self.run:
            self.trainer["init_from"] = self.run.as_written("tracing_from_weights")

    # --- data

    def _data(self) -> None:
        dataset = self._section("dataset")
        loading, sampling = self._section("dataloader"), self._section("dataset_sampler")
        sampler_type = _name(sampling.get("type", _SAMPLER[0]), "dataset_sampler.type")
        loader_type = _name(loading.get("type", _DATA_LOADER[0]), "dataloader.type")
        options = {stage: self._options(loading, stage, loader_type in _DATA_LOADER) for stage in _DATASETS}
        is_plain = loader_type in _DATA_LOADER and sampler_type in _SAMPLER
        self.has_loader = not is_plain or any(name in options["train"] for name in _LOADER_ONLY)
        if self.has_loader:
            has_sampler = loader_type in _DATA_LOADER and sampler_type not in _SAMPLER
            self.note(
                "dataset_sampler.type" if has_sampler else "dataloader",
                "the loader is built as in nnScaler and used unchanged: each of n processes takes every n-th of its "
                "batches, so neither it nor its dataset may split the data by rank.",
            )
        datasets: dict[str, dict[str, Any]] = {}
        for stage in _DATASETS:
            arguments = dataset.arguments(f"{stage}_args")
            if arguments or stage == "train":  # nnScaler builds the other sets only if they have arguments
                datasets[stage] = _describe_call(dataset.target(), arguments, f"dataset.{stage}_args")
        for stage, data in datasets.items():
            name, kwargs = _DATASETS[stage], options[stage]
            differs = kwargs.get("collate_fn") != options["train"].get("collate_fn")
            if self.has_loader or differs or any(option in kwargs for option in _LOADER_ONLY):
                sampler = sampler_type if "type" in sampling or sampling.get("train_args") else None
                self.trainer[f"{name}_loader"] = self._loader(loader_type, sampler, sampling, stage, data, kwargs)
            else:
                self.trainer[f"{name}_dataset"] = data
        self._batches()
        if not self.has_loader:
            self._sampling(sampling)
            self._loading(options["train"])

    def _options(self, loading: _Section, stage: str, is_known: bool) -> dict[str, Any]:
        """Return the arguments of the loader of a stage."""
        key = f"{stage}_args" if loading.get(f"{stage}_args") else "train_args"
        options, where = loading.arguments(key), f"dataloader.{key}"
        if "batch_size" in options:
            raise ConfigError(f"`{where}.batch_size` is rejected by nnScaler, too. Write `micro_batch_size` instead.")
        for name in [name for name in ("dataset", "sampler") if name in options]:
            del options[name]  # as nnScaler does
            if key.startswith(stage):
                self.note(f"{where}.{name}", "it has no effect in nnScaler either.")
        if isinstance(options.get("collate_fn"), str):
            options["collate_fn"] = {"__value_type": "function", "value": options["collate_fn"]}
        if not is_known:
            return options
        for name in options:
            if name not in _LOADING and name not in _LOADER_ONLY:
                raise ConfigError(
                    f"`{where}.{name}` is no argument that nnScaler could pass to a DataLoader."
                    f"{did_you_mean(name, (*_LOADING, *_LOADER_ONLY))}"
                )
        options.pop("shuffle", None)
        if _parse_literal(loading.get(key, {}).get("shuffle")):
            raise ConfigError(
                f"`{where}.shuffle` cannot be true with a sampler, which nnScaler always passes. Write "
                "`dataset_sampler.train_args.shuffle`, which is true by default."
            )
        return options

    def _loader(
        self, loader: str, sampler: str | None, sampling: _Section, stage: str, data: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the description of a loader built as in nnScaler."""
        key = f"{stage}_args" if sampling.get(f"{stage}_args") else "train_args"
        arguments = {name: value for name, value in sampling.arguments(key).items() if name not in _SAMPLER_ARGUMENTS}
        if sampler is None or sampler in _SAMPLER:
            arguments = {"shuffle": stage == "train", **(arguments if stage == "train" else {})}
        init_args: dict[str, Any] = {
            "loader": {"import_path": loader},
            "dataset": data,
            "batch_size": self._micro_batch()[1],
            "sampler_args": _convert_value(arguments, f"dataset_sampler.{key}"),
            **{name: _convert_value(value, f"dataloader.{name}") for name, value in options.items()},
        }
        if sampler is not None:
            init_args["sampler"] = {"import_path": sampler}
        return {"class_path": f"{_MODULE}.make_loader", "init_args": init_args}

    def _sampling(self, sampling: _Section) -> None:
        """Translate the arguments of nnScaler's default sampler."""
        arguments = sampling.arguments("train_args")
        known = ("shuffle", "seed", "drop_last", *_SAMPLER_ARGUMENTS)
        for name in arguments:
            if name not in known:
                raise ConfigError(
                    f"`dataset_sampler.train_args.{name}` is no argument of a DistributedSampler."
                    f"{did_you_mean(name, known)}"
                )
            if name in _SAMPLER_ARGUMENTS:
                self.note(f"dataset_sampler.train_args.{name}", "it has no effect in nnScaler either.")
        if "shuffle" in arguments:
            self.trainer["shuffle"] = arguments["shuffle"]
        if "seed" in arguments:
            self.note("dataset_sampler.train_args.seed", "the order follows from `seed` of the trainer.")
        if arguments.get("drop_last"):
            self.note("dataset_sampler.train_args.drop_last", "each sample is read once, whatever the number of "
                      "processes: none is dropped or repeated.")  # fmt: skip
        for stage in ("val", "test"):
            if sampling.get(f"{stage}_args"):
                self.note(f"dataset_sampler.{stage}_args", "evaluations read each sample once, in order.")

    def _loading(self, options: dict[str, Any]) -> None:
        """Translate the arguments of a DataLoader."""
        for name in ("drop_last", "num_workers", "pin_memory", "prefetch_factor"):
            if options.get(name) is not None:
                self.trainer[name] = options[name]
        if options.get("collate_fn") is not None:
            self.trainer["data_collator"] = _convert_value(options["collate_fn"], "dataloader.train_args.collate_fn")
        if options.get("persistent_workers") is False:
            self.note("dataloader.train_args.persistent_workers", "workers are kept for the entire run.")

    def _micro_batch(self) -> tuple[int, Any]:
        """Return the size of a micro-batch, as a number and for the converted file."""
        size = self.run.positive("micro_batch_size", 1) or 1
        return size, self.run.as_written("micro_batch_size") if "micro_batch_size" in self.run else size

    def _batches(self) -> None:
        """Convert the sizes of batches and the number of processes."""
        run, (micro, shown) = self.run, self._micro_batch()
        global_batch, accumulation = run.get("global_batch_size") or None, run.get("grad_accumulation_steps") or None
        replicas = self.processes // self.plan_ngpus if self.processes else None
        per_round = micro * (replicas or 1)
        rounds, rest = divmod(global_batch or per_round, per_round)
        is_off = accumulation and (rounds != accumulation if replicas else rounds % accumulation)
        if global_batch is not None and (rest or is_off):
            raise _size_error(global_batch, micro, accumulation, self.processes, self.plan_ngpus)
        if global_batch is None and replicas and self.plan_ngpus > 1:
            global_batch = per_round * (accumulation or 1)
        if self.has_loader:
            rounds = self._accumulation_steps(global_batch, accumulation, micro)
            if rounds != 1:
                self.trainer["gradient_accumulation_steps"] = rounds
            return
        self.trainer["batch_size"] = shown
        if global_batch is not None:
            is_given = bool(run.get("global_batch_size"))
            self.trainer["global_batch_size"] = run.as_written("global_batch_size") if is_given else global_batch
        elif accumulation:
            self.trainer["gradient_accumulation_steps"] = run.as_written("grad_accumulation_steps")

    def _accumulation_steps(self, global_batch: int | None, accumulation: int | None, micro: int) -> int:
        """Return the micro-batches per step and process of a custom loader."""
        if global_batch is None:
            return accumulation or 1
        if self.processes is None:
            raise ConfigError(
                f"`global_batch_size` is {global_batch}, and with a custom loader, gradients are accumulated over "
                "`grad_accumulation_steps` micro-batches. Write it, or `compute_config.runtime_ngpus`, "
                "in place of `global_batch_size`."
            )
        if global_batch % (micro * self.processes):
            raise ConfigError(
                f"`global_batch_size` is {global_batch}, and {self.processes} processes of `micro_batch_size` {micro} "
                f"make {micro * self.processes} at a time. Make it a multiple of that."
            )
        return global_batch // (micro * self.processes)

    # --- optimization

    def _optimization(self) -> None:
        optimizer = self._section("optimizer")
        self.trainer["optimizer"] = _describe_call(optimizer.target(), optimizer.arguments(), "optimizer.args")
        self.trainer["max_grad_norm"] = optimizer.as_written("clip_gnorm") if optimizer.get("clip_gnorm") else None
        kinds = ("mean", "sum", "per-token-mean")
        reduction = optimizer.choice("grad_reduction", "mean", kinds)
        shown = optimizer.choice("loss_reduction", "mean", kinds)
        if "per-token-mean" in (reduction, shown) and not optimizer.get("aggregate_outputs_fn"):
            raise ConfigError(
                "`optimizer.aggregate_outputs_fn` is missing, which counts the tokens of 'per-token-mean', in nnScaler "
                "as well. Write it, or 'mean'."
            )
        if reduction != "mean":
            self.trainer["grad_reduction"] = reduction
        if shown != reduction:
            self.note("optimizer.loss_reduction", "the loss in the logs is always the mean.")
        if optimizer.get("aggregate_outputs_fn"):
            self.note(
                "optimizer.aggregate_outputs_fn",
                "it is never called. Losses are averaged by samples or labels; where only the forward pass knows the "
                "number of tokens, write a `unit` that returns (sum of losses, number of tokens), in place of the one "
                "here.",
            )
        if "lr_scheduler" not in self.run:
            return
        schedule = self._section("lr_scheduler")
        self.trainer["lr_scheduler"] = _describe_call(schedule.target(), schedule.arguments(), "lr_scheduler.args")
        self.trainer["scheduler_interval"] = schedule.choice("interval", "epoch", ("epoch", "step"))

    def _length(self) -> None:
        run, trainer = self.run, self.trainer
        if not run.get("max_epochs") and not run.get("max_train_steps"):
            raise ConfigError("`max_epochs` or `max_train_steps` is missing, of which nnScaler needs one. Write one.")
        for theirs, ours in (("max_epochs", "epochs"), ("max_train_steps", "max_steps")):
            if run.get(theirs):
                run.positive(theirs)
                trainer[ours] = run.as_written(theirs)
        if "seed" in run:
            trainer["seed"] = run.as_written("seed")
        if "eval_dataset" not in trainer and "eval_loader" not in trainer:
            return
        interval = self._evaluation_interval()
        if interval != "1ep":
            trainer["eval_steps"] = interval
        if run.get("max_val_steps"):
            self.note("max_val_steps", "every evaluation is over the entire set. Wrap the dataset into "
                      "omnitrain.EvalSet(data, subset=...), which counts samples.")  # fmt: skip

    def _evaluation_interval(self) -> int | str:
        """Return the interval of evaluations; nnScaler evaluates before each save too, to score the checkpoint."""
        run, checkpoint = self.run, self.checkpoint
        steps, epochs = run.get("val_every_n_train_steps"), run.get("val_every_n_epochs", 1)
        save_steps, save_epochs = checkpoint.get("every_n_train_steps"), checkpoint.get("every_n_epochs")
        if checkpoint.get("no_save"):
            save_steps = save_epochs = None
        elif not save_steps:
            save_epochs = save_epochs or 1
        moments = [
            (save_steps, "steps", "checkpoint.every_n_train_steps", checkpoint),
            (steps, "steps", "val_every_n_train_steps", run),
            (save_epochs, "epochs", "checkpoint.every_n_epochs", checkpoint),
            (epochs, "epochs", "val_every_n_epochs", run),
        ]
        moments = [moment for moment in moments if moment[0]]
        if not moments:
            return "1ep"
        unit = moments[0][1]
        alike = [moment for moment in moments if moment[1] == unit]
        # the shortest if it divides all others, else that of the saves
        chosen = min(alike, key=lambda moment: moment[0])
        if any(moment[0] % chosen[0] for moment in alike):
            chosen = alike[0]
        missed = [moment for moment in moments if moment[1] != unit or moment[0] % chosen[0]]
        for number, its_unit, key, _ in missed:
            self.note(
                key,
                f"nnScaler evaluates every {number} {its_unit} as well. Evaluations have one interval, here "
                f"{chosen[0]} {unit} by `{chosen[2]}`. A callback may ask for others: trainer.request_evaluate().",
            )
        if unit == "epochs":
            return f"{chosen[0]}ep"
        return chosen[3].as_written(chosen[2].rpartition(".")[2])

    # --- files

    def _checkpoints(self) -> None:
        checkpoint, trainer = self.checkpoint, self.trainer
        self._resume(checkpoint)
        if checkpoint.get("no_save"):
            if self.train.get("resume_from") in ("auto", "best"):
                raise ConfigError(
                    "`checkpoint.no_save` leaves no checkpoints to look for, and `checkpoint.resume_from` looks for "
                    "one in `save_dir`. Leave one of them out, or write the path of a checkpoint."
                )
            return
        checkpoint.choice("save_type", "sharded", ("sharded", "deduped", "merged"))
        trainer["save_dir"] = checkpoint.as_written("save_dir") if "save_dir" in checkpoint else "./checkpoints"
        steps, epochs = checkpoint.positive("every_n_train_steps"), checkpoint.positive("every_n_epochs")
        if steps and epochs:
            raise ConfigError(
                f"`checkpoint.every_n_train_steps` is {steps} and `checkpoint.every_n_epochs` is {epochs}, of which "
                "nnScaler takes one. Leave one of them out."
            )
        if steps:
            trainer["save_steps"] = checkpoint.as_written("every_n_train_steps")
        elif epochs and epochs > 1:
            trainer["save_steps"] = f"{epochs}ep"
        if checkpoint.positive("keep_last_n_checkpoints"):
            trainer["save_total_limit"] = checkpoint.as_written("keep_last_n_checkpoints")
        if checkpoint.get("save_best") is False:
            trainer["keep_best"] = 0
        if checkpoint.get("save_last") is False:
            self.note("checkpoint.save_last", "`last` always names the newest checkpoint, which takes no space.")
        if "save_type" in checkpoint:
            self.note("checkpoint.save_type", "checkpoints have one format, for any number of processes: there is "
                      "nothing to merge.")  # fmt: skip

    def _resume(self, checkpoint: _Section) -> None:
        resume_from, linked = checkpoint.get("resume_from"), checkpoint.linked("resume_from")
        if resume_from is None:
            return
        where = "checkpoint.resume_from"
        if isinstance(resume_from, str):
            resume_from, linked = {"checkpoint": resume_from}, {"checkpoint": linked}
        resume = _Section(where, resume_from, linked, _KEYS[where])
        source = resume.get("checkpoint", "last")
        if source == "last":
            self.train["resume_from"] = "auto"  # starts afresh without a checkpoint, as nnScaler does
            return
        if source == "best":
            self.train["resume_from"] = "best"
            self.note(where, "a run without a best checkpoint is an error here, not a fresh start.")
            return
        is_path = isinstance(source, str)
        self.train["resume_from"] = (
            resume.as_written("checkpoint") if is_path else _convert_value(_parse_literal(linked["checkpoint"]), where)
        )
        self.note(where, "it must be a checkpoint of omnitrain. For weights of nnScaler, merge them with its "
                  "Trainer.merge_checkpoint, and pass the file as `init_from` of the trainer.")  # fmt: skip
        for key in ("convert_fn", "with_merged"):
            if key in resume:
                self.note(f"{where}.{key}", "weights are converted by `init_from: {path: ..., convert: ...}`."
                          if key == "convert_fn" else "any number of processes reads any checkpoint.")  # fmt: skip

    def _precision(self) -> None:
        precision = self.run.get("precision") or "none"
        if isinstance(precision, str):
            precision = dict.fromkeys(_TENSORS, precision)
        if not isinstance(precision, dict):
            raise ConfigError(f"`precision` must be one of {', '.join(_DTYPES)}, or a map of them, got {precision!r}.")
        dtypes: dict[str, str] = {}
        for name, dtype in precision.items():
            if name not in _TENSORS:
                raise ConfigError(
                    f"`precision.{name}` is none of {', '.join(_TENSORS)}.{did_you_mean(str(name), _TENSORS)}"
                )
            if dtype not in _DTYPES:
                raise ConfigError(
                    f"`precision` must be one of {', '.join(_DTYPES)}, got {dtype!r} for {name}."
                    f"{did_you_mean(str(dtype), _DTYPES)}"
                )
            if dtype != "none":
                dtypes[_TENSORS[name]] = dtype
        if dtypes.get("parameters") == "fp16":
            self.trainer["autocast"] = "fp16"
            dtypes = {name: dtype for name, dtype in dtypes.items() if dtype != "fp16"}
            self.note("precision", "parameters of fp16 do not train: they keep their dtype, and the forward pass is in "
                      "fp16 by `autocast`, with a scaled loss. 'bf16' is converted unchanged.")  # fmt: skip
        if dtypes:
            self.trainer["dtypes"] = dtypes

    # --- reports

    def _reports(self) -> None:
        loggers, callbacks = list[Any](), list[Any]()
        for number, plain in enumerate(self.run.get("log", [])):
            linked = self.run.linked("log")
            name = f"log[{number}]"
            part = self._logger(name, self._section(name, plain, linked[number]))
            loggers += [part] if part else []
        if "hook" in self.run:
            part = self._hook()
            callbacks += [part] if part else []
        if callbacks:
            self.trainer["callbacks"] = callbacks
        if loggers:
            self.trainer["loggers"] = loggers
        if self.run.get("enable_progress_bar") is False:
            self.trainer["progress_bar"] = False
            self.note("enable_progress_bar", "false prints nothing. Leave `progress_bar` out for plain lines wherever "
                      "there is no terminal, at `log_steps`.")  # fmt: skip
        elif "log_progress_every_n_train_steps" in self.run:
            self.note("log_progress_every_n_train_steps", "it has no effect with a progress bar, in nnScaler too. Rows "
                      "are logged at `log_steps`.")  # fmt: skip

    def _logger(self, name: str, section: _Section) -> dict[str, Any] | None:
        target, arguments = section.target(), section.arguments()
        kind = target.rpartition(".")[2]
        is_theirs = target == kind or target.startswith("nnscaler.")
        if kind == "WandbLogger" and is_theirs:
            return _describe_call("WandbLogger", arguments, f"{name}.args")
        if kind == "TensorBoardLogger" and is_theirs:
            folder = "/".join(str(arguments.pop(key)) for key in ("root_dir", "name") if arguments.get(key))
            for key in sorted(arguments.keys() - {"root_dir", "name"}):
                self.note(f"{name}.args.{key}", "TensorBoardLogger takes only `log_dir` and `every`.")
            return _describe_call("TensorBoardLogger", {"log_dir": folder} if folder else {}, name)
        if is_theirs:
            raise ConfigError(
                f"`{name}.type` is {target!r}, and nnScaler has no such logger."
                f"{did_you_mean(kind, ('TensorBoardLogger', 'WandbLogger'))}"
            )
        self.note(name, f"{target} is written for nnScaler. Write a Callback with `on_log(trainer, logs)`, and name it "
                  "in `callbacks`; `loggers` has names of services.")  # fmt: skip
        return None

    def _hook(self) -> dict[str, Any] | None:
        plain, linked = self.run.get("hook"), self.run.linked("hook")
        if "type" in plain:
            section = self._section("hook", plain, linked)
            target, arguments = section.target(), section.arguments()
            self.note("hook.type", f"derive {target} from omnitrain.TrainHook, which has the same methods." + (
                " Its arguments are passed by name, not as one dict." if arguments else ""))  # fmt: skip
            hooks = _describe_call(target, arguments, "hook.args")
            return {"class_path": "HookCallback", "init_args": {"hooks": hooks}}
        known = dict.fromkeys((*_HOOKS, *_NEVER_CALLED), _TEXT)
        section, functions = _Section("hook", plain, linked, known), dict[str, Any]()
        for name in plain:
            if name not in section:
                continue
            if name in _NEVER_CALLED:
                self.note(f"hook.{name}", f"it is never called. {_NEVER_CALLED[name].capitalize()}.")
                continue
            if name in _FEWER_ARGUMENTS:
                self.note(f"hook.{name}", f"{_FEWER_ARGUMENTS[name]} here.")
            functions[name] = {"import_path": _name(section.get(name), f"hook.{name}")}
        return {"class_path": "HookCallback", "init_args": {"hooks": functions}} if functions else None


def _size_error(total: int, micro: int, accumulation: int | None, processes: int | None, plan: int) -> ConfigError:
    """Return the error for batch sizes that contradict each other."""
    replicas = processes // plan if processes else 1
    parts = [f"`micro_batch_size` {micro}"]
    if processes:
        parts.append(
            f"{replicas} replicas (`compute_config.runtime_ngpus` {processes} / `compute_config.plan_ngpus` {plan})"
        )
    if accumulation:
        parts.append(f"`grad_accumulation_steps` {accumulation}")
    product = micro * replicas * (accumulation or 1)
    remedy = " Or leave `runtime_ngpus` out: here the launcher counts the processes." if processes else ""
    must = "that" if accumulation and processes else "a multiple of that"
    return ConfigError(
        f"`global_batch_size` is {total}, and {' x '.join(parts)} makes {product}. Make it {must}.{remedy}"
    )


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
    """Build a loader as nnScaler does: from the dataset, the batch size and a sampler.

    The sampler is for one process: each process of a run takes its share of the loader's batches.

    Args:
        loader: The class of the loader, or a function.
        dataset: The dataset. A stream gets no sampler.
        batch_size: Samples in a micro-batch.
        sampler: The class of the sampler, or a function; None is PyTorch's DistributedSampler.
        sampler_args: Its arguments other than `dataset`, `num_replicas` and `rank`.
        **options: Other arguments of the loader.

    Raises:
        ConfigError: If a stream is to have a sampler.
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
