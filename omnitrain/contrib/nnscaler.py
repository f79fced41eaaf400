"""nnScaler's configuration files as ours: what each key is called here, and what to do where there is no such key.

`convert` turns plain values into plain values and imports nothing that they name. The functions below it are named by
converted files, where a class and its arguments do not say enough.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omnitrain.callbacks.train_hook import TrainHook
from omnitrain.core.errors import ConfigError, did_you_mean

_TEXT, _WHOLE, _NUMBER, _SWITCH, _MAP, _LIST, _ANY = "text", "whole", "number", "switch", "map", "list", "any"
_EXPECTED = {
    _TEXT: "a string",
    _WHOLE: "a whole number",
    _NUMBER: "a number",
    _SWITCH: "true or false",
    _MAP: "a map",
    _LIST: "a list",
}
_OF_STAGES = {"type": _TEXT, "train_args": _MAP, "val_args": _MAP, "test_args": _MAP}
_KEYS: dict[str, dict[str, str]] = {
    "": {
        "init_module": _TEXT, "vars": _MAP, "compute_config": _MAP, "gen_savedir": _TEXT, "gen_reuse": _TEXT,
        "pas_policy": _TEXT, "broadcast_strategy": _TEXT, "instance_name": _ANY, "run_mode": _TEXT,
        "dummy_sample_gen_fn": _TEXT, "tracing_from_weights": _TEXT, "model": _MAP, "optimizer": _MAP,
        "dataset": _MAP, "dataloader": _MAP, "dataset_sampler": _MAP, "lr_scheduler": _MAP, "checkpoint": _MAP,
        "log": _LIST, "hook": _MAP, "debug": _MAP, "precision": _ANY, "micro_batch_size": _WHOLE,
        "global_batch_size": _WHOLE, "grad_accumulation_steps": _WHOLE, "max_epochs": _WHOLE,
        "max_train_steps": _WHOLE, "max_val_steps": _WHOLE, "val_every_n_train_steps": _WHOLE,
        "val_every_n_epochs": _WHOLE, "enable_progress_bar": _SWITCH, "log_progress_every_n_train_steps": _WHOLE,
        "seed": _WHOLE, "init_env_fn": _TEXT, "dummy_sample_post_process_fn": _TEXT,
    },
    "compute_config": {
        "plan_ngpus": _WHOLE, "runtime_ngpus": _WHOLE, "constant_folding": _SWITCH, "trace_strategy": _TEXT,
        "use_zero": _ANY, "zero_ngroups": _WHOLE, "zero_use_reduce_scatter": _SWITCH,
        "zero_param_level_sharding": _SWITCH, "inference_only": _SWITCH,
        "use_end2end": _SWITCH, "use_async_reducer": _SWITCH, "reducer_bucket_cap_mb": _NUMBER, "pas_config": _MAP,
        "user_config": _MAP,
    },
    "model": {"type": _TEXT, "args": _MAP, "parallel_modules": _LIST},
    "optimizer": {
        "type": _TEXT, "args": _MAP, "clip_gnorm": _NUMBER, "loss_reduction": _TEXT, "grad_reduction": _TEXT,
        "aggregate_outputs_fn": _TEXT, "param_clss_fn": _TEXT, "grad_reduce_divisor": _NUMBER,
    },
    "dataset": _OF_STAGES,
    "dataloader": _OF_STAGES,
    "dataset_sampler": _OF_STAGES,
    "lr_scheduler": {"type": _TEXT, "args": _MAP, "interval": _TEXT},
    "checkpoint": {
        "save_dir": _TEXT, "no_save": _SWITCH, "format": _TEXT, "serializer": _ANY,
        "save_type": _TEXT, "save_last": _SWITCH, "save_best": _SWITCH,
        "symlink_best_and_last": _SWITCH, "every_n_train_steps": _WHOLE, "every_n_epochs": _WHOLE,
        "keep_last_n_checkpoints": _WHOLE, "resume_from": _ANY,
    },
    "checkpoint.resume_from": {"checkpoint": _ANY, "convert_fn": _TEXT, "with_merged": _SWITCH, "save_memory": _SWITCH},
    "log": {"type": _TEXT, "args": _MAP},
    "hook": {"type": _TEXT, "args": _MAP},
    "debug": {"check_gradient_sync_cross_devices": _SWITCH},
}  # fmt: skip
"""nnScaler's keys by section, and what each may hold; any other is an error there too."""

_AS_IT_IS = "the model runs as it is: nothing is traced, and no code is generated."
_SHARDS = "`omnitrain launch --fsdp` (or --zero 1, 2 or 3) shards the run, with AccelerateTrainer."
_NONE_HERE: dict[str, str] = {
    "init_module": "import it in the module of the model, which is imported first.",
    "gen_savedir": _AS_IT_IS,
    "gen_reuse": _AS_IT_IS,
    "pas_policy": f"{_AS_IT_IS} {_SHARDS}",
    "broadcast_strategy": _AS_IT_IS,
    "instance_name": _AS_IT_IS,
    "dummy_sample_gen_fn": _AS_IT_IS,
    "dummy_sample_post_process_fn": _AS_IT_IS,
    "init_env_fn": "there is no call before the model is made. Do it at the top of the model's module; `seed`, "
    "`deterministic` and `matmul_precision` of the trainer may be what it is for.",
    "compute_config.constant_folding": _AS_IT_IS,
    "compute_config.trace_strategy": _AS_IT_IS,
    "compute_config.inference_only": _AS_IT_IS,
    "compute_config.pas_config": _AS_IT_IS,
    "compute_config.user_config": _AS_IT_IS,
    "compute_config.zero_ngroups": _SHARDS,
    "compute_config.zero_use_reduce_scatter": _SHARDS,
    "compute_config.zero_param_level_sharding": _SHARDS,
    "compute_config.use_async_reducer": "gradients are averaged while the backward pass makes them.",
    "compute_config.reducer_bucket_cap_mb": "PyTorch's default of 25 MB holds.",
    "model.parallel_modules": f"the model is sharded as a whole. {_SHARDS}",
    "optimizer.param_clss_fn": "PyTorch decides which gradients are sent together. `param_groups` of the trainer gives "
    "parameters options of their own.",
    "optimizer.grad_reduce_divisor": "gradients are averaged by PyTorch.",
    "checkpoint.format": "checkpoints have one format, of safetensors and JSON.",
    "checkpoint.serializer": "checkpoints have one format, of safetensors and JSON.",
    "checkpoint.symlink_best_and_last": "`best` and `last` are small files that name a checkpoint.",
    "debug.check_gradient_sync_cross_devices": "gradients are averaged by PyTorch, and not compared again.",
}
"""Keys without counterpart, and what to do instead."""

_NEVER_CALLED = {
    "after_aggregate_train_step_outputs": "use before_log_train_metrics, or on_train_step_end for this rank's outputs",
    "after_aggregate_val_step_outputs": "use on_val_end, or on_val_step_end for this rank's outputs",
    "on_expire_checkpoint": "copy what is to be kept in on_save_checkpoint: nothing is called before one is deleted",
    "before_sync_grad": "use after_sync_grad: gradients are averaged while the backward pass makes them",
}
"""Hooks that are not called here, and what to use instead."""
_CALLED_WITH_LESS = {
    "on_step_end": "it is called with trainer, epoch, idx",
    "before_log_train_metrics": "it is called with trainer, step_metrics",
}
"""Hooks that get less than there."""
_HOOKS = [name for name in vars(TrainHook) if not name.startswith("_")]

_DATA_LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_SAMPLER = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
_LOADING = ("num_workers", "pin_memory", "prefetch_factor", "drop_last", "collate_fn", "persistent_workers", "shuffle")
"""Arguments of a DataLoader that our trainers have too, or need not have."""
_ONLY_LOADERS = ("timeout", "worker_init_fn", "multiprocessing_context", "generator", "pin_memory_device", "in_order")
_GIVEN_TO_SAMPLERS = ("dataset", "num_replicas", "rank")
_SETS = {"train": "train", "val": "eval", "test": "test"}
_HERE = "omnitrain.contrib.nnscaler"
_DTYPES = ("fp32", "fp16", "bf16", "none")
_TENSORS = {"param": "parameters", "buffer": "buffers", "input": "inputs"}
_BUILTIN_TYPES: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float, "bool": bool}

_REFERENCE = re.compile(r"(?<!\$)\$(?:\{([^}]+)\}|\(([^)]+)\))")
_OBJECT_REFERENCE = re.compile(r"\$!(?:\(([^)]+)\)|\{([^}]+)\})")


def convert(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our configuration for one of nnScaler's, and a line for each key that has no counterpart.

    A line names the key and says what to do instead.

    >>> config, notes = convert({
    ...     "model": {"type": "my.Net"}, "dataset": {"type": "my.Rows"}, "max_epochs": 2, "gen_reuse": "auto",
    ...     "optimizer": {"type": "torch.optim.Adam", "args": {"lr": "1e-3"}},
    ... })
    >>> config["trainer"]["optimizer"]
    {'class_path': 'torch.optim.Adam', 'init_args': {'lr': 0.001}}
    >>> notes
    ['`gen_reuse`: the model runs as it is: nothing is traced, and no code is generated.']

    Args:
        values: What nnScaler's file holds, with all that was to be changed on its command line.

    Raises:
        ConfigError: If a key is unknown to nnScaler, a value wrong, or two contradict each other.
    """
    return _Conversion(values).result()


# --- references


class _References:
    """References between the values of a file.

    Args:
        tree: All of the file.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree
        self.objects: dict[str, int] = {}  # how often each is referred to

    def resolve(self, value: Any, where: str, inline: bool, pending: tuple[str, ...] = ()) -> Any:
        """Return a value with references as ours.

        Args:
            value: The value.
            where: Its key.
            inline: Whether to put in what `vars` hold; otherwise single values are referred to in our way.
            pending: The references that led here.

        Raises:
            ConfigError: If one leads nowhere, or into a circle.
        """
        if isinstance(value, Mapping):
            return {key: self.resolve(one, _joined(where, key), inline, pending) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolve(one, _joined(where, number), inline, pending) for number, one in enumerate(value)]
        if not isinstance(value, str):
            return value
        if whole := _OBJECT_REFERENCE.fullmatch(value):
            return self._object(whole[1] or whole[2], where, inline, pending)
        if whole := _REFERENCE.fullmatch(value):
            return self._target(whole[1] or whole[2], where, inline, pending)
        text = _REFERENCE.sub(lambda one: str(self._target(one[1] or one[2], where, inline, pending)), value)
        if r"$\{" in text or "$${" in text:
            raise ConfigError(f"`{where}` has a literal '${{' in {value!r}, which begins a reference here. Change it.")
        return text.replace(r"$\(", "$(").replace("$$(", "$(")

    def _target(self, name: str, where: str, inline: bool, pending: tuple[str, ...]) -> Any:
        if name in pending:
            raise ConfigError(f"`{where}` refers to itself: {' -> '.join([*pending, name])}. Write a value in one.")
        try:
            found = self._at(name, (*pending, name))
        except LookupError:
            if name.isidentifier():  # nnScaler, too, looks into the file first
                return f"${{env:{name}}}"
            raise ConfigError(f"`{where}` refers to {name!r}, and there is no such key.{self._near(name)}") from None
        found = self.resolve(found, name, inline, (*pending, name))
        is_single = not isinstance(found, dict | list)
        return f"${{{name}}}" if name.startswith("vars.") and is_single and not inline else found

    def _object(self, name: str, where: str, inline: bool, pending: tuple[str, ...]) -> Any:
        if name != "self" and not name.startswith("vars."):
            raise ConfigError(f"`{where}` refers to {name!r} by '$!'. That must be 'self', or begin with 'vars.'.")
        if name == "self":
            raise ConfigError(
                f"`{where}` asks for nnScaler's whole configuration, which does not exist here. Pass the values that "
                "are needed one by one: '$(micro_batch_size)'."
            )
        found = self._target(name, where, inline, pending)
        if inline:
            return found
        self.objects[name] = self.objects.get(name, 0) + 1
        return f"${{{name}}}"

    def _at(self, name: str, pending: tuple[str, ...]) -> Any:
        found: Any = self._tree
        for part in name.split("."):
            if isinstance(found, str):  # a map that is a reference itself
                found = self.resolve(found, name, inline=True, pending=pending)
            if isinstance(found, list | tuple) and part.isdigit():
                found = found[int(part)]
            elif isinstance(found, Mapping):
                found = found[part]
            else:
                raise LookupError(name)
        return found

    def _near(self, name: str) -> str:
        return did_you_mean(name, list(_names_in(self._tree)))


def _names_in(tree: Any, before: str = "") -> Iterable[str]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        yield _joined(before, key)
        yield from _names_in(value, _joined(before, key))


def _joined(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if part != "")


# --- values


def _guessed(value: Any) -> Any:
    """Return what nnScaler takes an argument for: strings that are literals of Python are these."""
    if isinstance(value, dict):
        if value.keys() == {"__value_type", "value"}:
            return value
        return {_guessed_key(key): _guessed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_guessed(one) for one in value]
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    try:
        return _plain(ast.literal_eval(value), value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return value


def _guessed_key(key: Any) -> Any:
    found = _guessed(key)
    return key if isinstance(found, list | dict) else found


def _plain(found: Any, text: str) -> Any:
    """Return a literal as values that a file can hold; a string where there is no such thing."""
    if isinstance(found, tuple | list | set):
        return [_plain(one, repr(one)) for one in found]
    if isinstance(found, dict):
        return {key: _plain(one, repr(one)) for key, one in found.items()}
    return found if found is None or isinstance(found, bool | int | float | str) else text


def _made(value: Any, where: str) -> Any:
    """Return an argument with objects and functions described in our way."""
    if isinstance(value, list):
        return [_made(one, _joined(where, number)) for number, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.keys() & {"class_path", "import_path"}:
        raise ConfigError(
            f"`{where}` is a map with the key 'class_path' or 'import_path', which describes an object here. Write the "
            "converted file by hand at this place."
        )
    if "__type" in value:
        rest = {key: one for key, one in value.items() if key != "__type"}
        return _call_of(_name(value["__type"], f"{where}.__type"), rest, where)
    if "__value_type" not in value:
        return {key: _made(one, _joined(where, key)) for key, one in value.items()}
    if "value" not in value:
        raise ConfigError(f"`{where}` has '__value_type' and no 'value'. Write both, or '__type'.")
    kind, given = _name(value["__value_type"], f"{where}.__value_type"), _made(value["value"], f"{where}.value")
    if kind == "function":
        return {"import_path": _name(given, f"{where}.value")}
    if kind in _BUILTIN_TYPES and not (isinstance(given, str) and "${" in given) and not isinstance(given, dict | list):
        try:
            return _BUILTIN_TYPES[kind](given)
        except (TypeError, ValueError):
            raise ConfigError(f"`{where}.value` must be of the type {kind}, got {given!r}.") from None
    target = kind if "." in kind else f"builtins.{kind}"
    return {"class_path": f"{_HERE}.of_value", "init_args": {"type": {"import_path": target}, "value": given}}


def _call_of(path: str, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the description of an object that is made by a call."""
    _check_names(arguments, where)
    made = {key: _made(one, _joined(where, key)) for key, one in arguments.items()}
    return {"class_path": path, "init_args": made} if made else {"class_path": path}


def _check_names(arguments: Mapping[Any, Any], where: str) -> None:
    """Raise ConfigError for a key that is no name of an argument."""
    for key in arguments:
        if not isinstance(key, str):
            raise ConfigError(f"`{where}` must have names of arguments as keys, got {key!r}.")


def _name(value: Any, where: str) -> str:
    """Return the dotted name of a class or function."""
    is_name = isinstance(value, str) and ("${" in value or all(part.isidentifier() for part in value.split(".")))
    if not is_name:
        raise ConfigError(f"`{where}` must be the name of a class or function, such as 'my.Net', got {value!r}.")
    return value


def _coerced(value: Any, kind: str, where: str) -> Any:
    """Return a value of a key as its type, as nnScaler reads it.

    Raises:
        ConfigError: If it is none.
    """
    wrong = ConfigError(f"`{where}` must be {_EXPECTED.get(kind, '')}, got {value!r:.200}.")
    if kind == _ANY:
        return value
    if kind in (_MAP, _LIST):
        value = _guessed(value) if isinstance(value, str) else value
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
    if kind == _SWITCH:
        words = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() not in words:
            raise wrong
        return words[str(value).lower()]
    try:
        if isinstance(value, bool) or (kind == _WHOLE and float(value) != int(float(value))):
            raise wrong
        return int(float(value)) if kind == _WHOLE else float(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None


class _Section:
    """The keys of one section.

    Args:
        name: Its name; "" is the file itself.
        plain: Its values, without any reference.
        linked: The same, where what comes from `vars` is a reference.
        kinds: The keys that there are.

    Raises:
        ConfigError: If a key is unknown, or a value is of another type.
    """

    def __init__(self, name: str, plain: Any, linked: Any, kinds: Mapping[str, str]) -> None:
        self.name = name
        if not isinstance(plain, dict):
            raise ConfigError(f"`{name or 'the file'}` must be a map of keys and values, got {plain!r:.200}.")
        for key in plain:
            if key not in kinds:
                there = "" if len(kinds) > 20 else f" `{name}` has {', '.join(kinds)}."
                raise ConfigError(
                    f"`{_joined(name, key)}` is no key of nnScaler.{did_you_mean(str(key), kinds)}{there}"
                )
        # nnScaler takes a key without a value for one that is not there
        self._values = {
            key: _coerced(value, kinds[key], _joined(name, key)) for key, value in plain.items() if value is not None
        }
        self._linked = {key: linked[key] if isinstance(linked, dict) else value for key, value in plain.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value without references."""
        return self._values.get(key, default)

    def shown(self, key: str) -> Any:
        """Return a value as it is to be written: as a reference if it is one to `vars`."""
        linked = self._linked[key]
        return linked if isinstance(linked, str) and "${" in linked else self._values[key]

    def linked(self, key: str) -> Any:
        """Return a value with its references."""
        return self._linked.get(key)

    def arguments(self, key: str = "args") -> dict[str, Any]:
        """Return the arguments of a call, as nnScaler guesses their types."""
        if key not in self._values:
            return {}
        where = _joined(self.name, key)
        found = _coerced(self._linked[key], _MAP, where)
        _check_names(found, where)
        return {name: _guessed(one) for name, one in found.items()}

    def target(self) -> str:
        """Return the name of the class or function that this section calls."""
        if "type" not in self._values:
            raise ConfigError(f"`{self.name}.type` is missing: the name of a class or function, such as 'my.Thing'.")
        return _name(self._values["type"], f"{self.name}.type")

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """Return one of a few words."""
        found = self.get(key, default)
        if found not in choices:
            raise ConfigError(
                f"`{_joined(self.name, key)}` must be one of {', '.join(choices)}, got {found!r}."
                f"{did_you_mean(found, choices)}"
            )
        return found

    def positive(self, key: str, default: int | None = None) -> int | None:
        """Return a number of at least 1, or None."""
        found = self.get(key, default)
        if found is not None and found < 1:
            raise ConfigError(f"`{_joined(self.name, key)}` must be at least 1, got {found}. Leave it out instead.")
        return found


# --- the conversion


class _Conversion:
    """One file on its way from nnScaler's keys to ours."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"A configuration of nnScaler is a map of keys and values, got {values!r:.200}.")
        references = _References(values)
        self._plain = references.resolve(values, "", inline=True)
        self._linked = references.resolve(values, "", inline=False)
        self.trainer: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        several = [name for name, times in references.objects.items() if times > 1]
        self.notes = [f"`{name}`: each place that refers to it gets an object of its own." for name in several]
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
        free = _made(self.run.arguments("vars"), "vars")
        parts = {"vars": free, "trainer": self.trainer, "train": self.train}
        return {name: part for name, part in parts.items() if part}, self.notes

    def note(self, key: str, advice: str) -> None:
        """Tell what to do instead of a key."""
        self.notes.append(f"`{key}`: {advice}")

    def _section(self, name: str, plain: Any = None, linked: Any = None) -> _Section:
        """Return a section of the file, empty if it is not there."""
        if not name:
            plain, linked = self._plain, self._linked
        elif plain is None:
            plain, linked = self.run.get(name, {}), self.run.linked(name)
        section = _Section(name, plain, linked, _KEYS[name.split("[")[0]])
        for key, advice in _NONE_HERE.items():
            before, _, last = key.rpartition(".")
            if before == name and section.get(last) not in (None, False, "", {}, []):
                self.note(key, advice)
        return section

    # --- what runs

    def _compute(self) -> None:
        compute = self._section("compute_config")
        if compute.get("use_end2end") is False:
            raise ConfigError(
                "`compute_config.use_end2end` is false, which nnScaler's trainer does not run either: the model must "
                "take a batch and return its loss. Set it to true."
            )
        self.processes = compute.positive("runtime_ngpus")
        self.of_a_model = compute.positive("plan_ngpus", 1) or 1
        if self.processes and self.processes % self.of_a_model:
            raise ConfigError(
                f"`compute_config.runtime_ngpus` is {self.processes}, which is no multiple of "
                f"`compute_config.plan_ngpus`, {self.of_a_model}. Change one of them."
            )
        self.trainer["class_path"] = "Trainer" if self.processes == 1 else "AccelerateTrainer"
        if self.of_a_model > 1:
            self.note(
                "compute_config.plan_ngpus",
                f"a model is not cut into {self.of_a_model} parts. Each process takes batches of its own, and "
                "`omnitrain launch --fsdp` shards the weights.",
            )
        if self.processes:
            self.note("compute_config.runtime_ngpus", f"`omnitrain launch -n {self.processes}` starts the processes.")
        zero = str(compute.get("use_zero", False)).lower()
        if zero not in ("false", "true", "0", "1", "2", "3"):
            raise ConfigError(f"`compute_config.use_zero` must be true, false, or a stage from 0 to 3, got {zero!r}.")
        if zero not in ("false", "0"):
            self.note("compute_config.use_zero", "`omnitrain launch --fsdp` shards weights, gradients and moments; "
                      "`--zero 1` the moments alone, by DeepSpeed.")  # fmt: skip
        if self.run.choice("run_mode", "run", ("run", "compile")) == "compile":
            self.note("run_mode", "there is nothing to compile ahead: start the run.")
        self.run.choice("gen_reuse", "auto", ("auto", "match", "override", "moo", "graph"))

    def _model(self) -> None:
        model = self._section("model")
        self.trainer["model"] = _call_of(model.target(), model.arguments(), "model.args")
        self.trainer["unit"] = {"class_path": "omnitrain.model.units.WholeBatchUnit"}
        if "tracing_from_weights" in self.run:
            self.trainer["init_from"] = self.run.shown("tracing_from_weights")

    # --- data

    def _data(self) -> None:
        dataset = self._section("dataset")
        loading, sampling = self._section("dataloader"), self._section("dataset_sampler")
        own_sampler = _name(sampling.get("type", _SAMPLER[0]), "dataset_sampler.type")
        own_loader = _name(loading.get("type", _DATA_LOADER[0]), "dataloader.type")
        options = {stage: self._options(loading, stage, own_loader in _DATA_LOADER) for stage in _SETS}
        is_plain = own_loader in _DATA_LOADER and own_sampler in _SAMPLER
        self.has_loader = not is_plain or any(name in options["train"] for name in _ONLY_LOADERS)
        if self.has_loader:
            self.note(
                "dataset_sampler.type" if own_loader in _DATA_LOADER and own_sampler not in _SAMPLER else "dataloader",
                "the loader is made as there and used as it is: on several processes each takes every n-th of its "
                "batches, so neither it nor its dataset may split the data by rank.",
            )
        made: dict[str, dict[str, Any]] = {}
        for stage in _SETS:
            arguments = dataset.arguments(f"{stage}_args")
            if arguments or stage == "train":  # nnScaler makes the others only of arguments
                made[stage] = _call_of(dataset.target(), arguments, f"dataset.{stage}_args")
        for stage, data in made.items():
            name, given = _SETS[stage], options[stage]
            differs = given.get("collate_fn") != options["train"].get("collate_fn")
            if self.has_loader or differs or any(one in given for one in _ONLY_LOADERS):
                sampler = own_sampler if "type" in sampling or sampling.get("train_args") else None
                self.trainer[f"{name}_loader"] = self._loader(own_loader, sampler, sampling, stage, data, given)
            else:
                self.trainer[f"{name}_dataset"] = data
        self._batches()
        if not self.has_loader:
            self._sampling(sampling)
            self._loading(options["train"])

    def _options(self, loading: _Section, stage: str, is_known: bool) -> dict[str, Any]:
        """Return the arguments of the loader of a stage."""
        key = f"{stage}_args" if loading.get(f"{stage}_args") else "train_args"
        given, where = loading.arguments(key), f"dataloader.{key}"
        if "batch_size" in given:
            raise ConfigError(f"`{where}.batch_size` is refused by nnScaler, too. Write `micro_batch_size` instead.")
        for name in [name for name in ("dataset", "sampler") if name in given]:
            del given[name]  # as there
            if key.startswith(stage):
                self.note(f"{where}.{name}", "it has no effect there either.")
        if isinstance(given.get("collate_fn"), str):
            given["collate_fn"] = {"__value_type": "function", "value": given["collate_fn"]}
        if not is_known:
            return given
        for name in given:
            if name not in _LOADING and name not in _ONLY_LOADERS:
                raise ConfigError(
                    f"`{where}.{name}` is no argument that nnScaler could pass to a DataLoader."
                    f"{did_you_mean(name, (*_LOADING, *_ONLY_LOADERS))}"
                )
        given.pop("shuffle", None)
        if _guessed(loading.get(key, {}).get("shuffle")):
            raise ConfigError(
                f"`{where}.shuffle` cannot be true beside a sampler, which nnScaler always passes. Write "
                "`dataset_sampler.train_args.shuffle`, which is true by default."
            )
        return given

    def _loader(
        self, loader: str, sampler: str | None, sampling: _Section, stage: str, data: Any, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the description of a loader that is made as nnScaler does."""
        key = f"{stage}_args" if sampling.get(f"{stage}_args") else "train_args"
        arguments = {name: one for name, one in sampling.arguments(key).items() if name not in _GIVEN_TO_SAMPLERS}
        if sampler is None or sampler in _SAMPLER:
            arguments = {"shuffle": stage == "train", **(arguments if stage == "train" else {})}
        found: dict[str, Any] = {
            "loader": {"import_path": loader},
            "dataset": data,
            "batch_size": self._micro_batch()[1],
            "sampler_args": _made(arguments, f"dataset_sampler.{key}"),
            **{name: _made(one, f"dataloader.{name}") for name, one in given.items()},
        }
        if sampler is not None:
            found["sampler"] = {"import_path": sampler}
        return {"class_path": f"{_HERE}.make_loader", "init_args": found}

    def _sampling(self, sampling: _Section) -> None:
        """Translate the arguments of nnScaler's default sampler."""
        given = sampling.arguments("train_args")
        known = ("shuffle", "seed", "drop_last", *_GIVEN_TO_SAMPLERS)
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"`dataset_sampler.train_args.{name}` is no argument of a DistributedSampler."
                    f"{did_you_mean(name, known)}"
                )
            if name in _GIVEN_TO_SAMPLERS:
                self.note(f"dataset_sampler.train_args.{name}", "it has no effect there either.")
        if "shuffle" in given:
            self.trainer["shuffle"] = given["shuffle"]
        if "seed" in given:
            self.note("dataset_sampler.train_args.seed", "the order follows from `seed` of the trainer.")
        if given.get("drop_last"):
            self.note("dataset_sampler.train_args.drop_last", "each sample is read once, whatever the number of "
                      "processes: none is dropped or repeated.")  # fmt: skip
        for stage in ("val", "test"):
            if sampling.get(f"{stage}_args"):
                self.note(f"dataset_sampler.{stage}_args", "evaluations read each sample once, in order.")

    def _loading(self, given: dict[str, Any]) -> None:
        """Translate the arguments of a DataLoader."""
        for name in ("drop_last", "num_workers", "pin_memory", "prefetch_factor"):
            if given.get(name) is not None:
                self.trainer[name] = given[name]
        if given.get("collate_fn") is not None:
            self.trainer["data_collator"] = _made(given["collate_fn"], "dataloader.train_args.collate_fn")
        if given.get("persistent_workers") is False:
            self.note("dataloader.train_args.persistent_workers", "workers are kept for the whole run.")

    def _micro_batch(self) -> tuple[int, Any]:
        """Return the size of a micro-batch, and how it is to be written."""
        size = self.run.positive("micro_batch_size", 1) or 1
        return size, self.run.shown("micro_batch_size") if "micro_batch_size" in self.run else size

    def _batches(self) -> None:
        """Translate the three numbers that nnScaler compares, and the number of processes."""
        run, (micro, shown) = self.run, self._micro_batch()
        whole, accumulation = run.get("global_batch_size") or None, run.get("grad_accumulation_steps") or None
        replicas = self.processes // self.of_a_model if self.processes else None
        each = micro * (replicas or 1)
        turns, rest = divmod(whole or each, each)
        is_off = accumulation and (turns != accumulation if replicas else turns % accumulation)
        if whole is not None and (rest or is_off):
            raise _inconsistent(whole, micro, accumulation, self.processes, self.of_a_model)
        if whole is None and replicas and self.of_a_model > 1:
            whole = each * (accumulation or 1)
        if self.has_loader:
            turns = self._turns(whole, accumulation, micro)
            if turns != 1:
                self.trainer["gradient_accumulation_steps"] = turns
            return
        self.trainer["batch_size"] = shown
        if whole is not None:
            is_given = bool(run.get("global_batch_size"))
            self.trainer["global_batch_size"] = run.shown("global_batch_size") if is_given else whole
        elif accumulation:
            self.trainer["gradient_accumulation_steps"] = run.shown("grad_accumulation_steps")

    def _turns(self, whole: int | None, accumulation: int | None, micro: int) -> int:
        """Return the micro-batches of a step and process, where a loader of one's own makes them."""
        if whole is None:
            return accumulation or 1
        if self.processes is None:
            raise ConfigError(
                f"`global_batch_size` is {whole}, and with a loader of your own, gradients are accumulated over so "
                "many micro-batches as `grad_accumulation_steps` says. Write it, or `compute_config.runtime_ngpus`, "
                "in place of `global_batch_size`."
            )
        if whole % (micro * self.processes):
            raise ConfigError(
                f"`global_batch_size` is {whole}, and {self.processes} processes of `micro_batch_size` {micro} make "
                f"{micro * self.processes} at a time. Make it a multiple of that."
            )
        return whole // (micro * self.processes)

    # --- optimization

    def _optimization(self) -> None:
        optimizer = self._section("optimizer")
        self.trainer["optimizer"] = _call_of(optimizer.target(), optimizer.arguments(), "optimizer.args")
        self.trainer["max_grad_norm"] = optimizer.shown("clip_gnorm") if optimizer.get("clip_gnorm") else None
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
        self.trainer["lr_scheduler"] = _call_of(schedule.target(), schedule.arguments(), "lr_scheduler.args")
        self.trainer["scheduler_interval"] = schedule.choice("interval", "epoch", ("epoch", "step"))

    def _length(self) -> None:
        run, trainer = self.run, self.trainer
        if not run.get("max_epochs") and not run.get("max_train_steps"):
            raise ConfigError("`max_epochs` or `max_train_steps` is missing, of which nnScaler needs one. Write one.")
        for theirs, ours in (("max_epochs", "epochs"), ("max_train_steps", "max_steps")):
            if run.get(theirs):
                run.positive(theirs)
                trainer[ours] = run.shown(theirs)
        if "seed" in run:
            trainer["seed"] = run.shown("seed")
        if "eval_dataset" not in trainer and "eval_loader" not in trainer:
            return
        interval = self._evaluation_interval()
        if interval != "1ep":
            trainer["eval_steps"] = interval
        if run.get("max_val_steps"):
            self.note("max_val_steps", "every evaluation is over the whole set. Wrap the dataset into "
                      "omnitrain.EvalSet(data, subset=...), which counts samples.")  # fmt: skip

    def _evaluation_interval(self) -> int | str:
        """Return the one interval of evaluations: nnScaler evaluates before each save too, and scores what it saves."""
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
        # the shortest if it meets all others, else that of the saves
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
        return chosen[3].shown(chosen[2].rpartition(".")[2])

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
        trainer["save_dir"] = checkpoint.shown("save_dir") if "save_dir" in checkpoint else "./checkpoints"
        steps, epochs = checkpoint.positive("every_n_train_steps"), checkpoint.positive("every_n_epochs")
        if steps and epochs:
            raise ConfigError(
                f"`checkpoint.every_n_train_steps` is {steps} and `checkpoint.every_n_epochs` is {epochs}, of which "
                "nnScaler takes one. Leave one of them out."
            )
        if steps:
            trainer["save_steps"] = checkpoint.shown("every_n_train_steps")
        elif epochs and epochs > 1:
            trainer["save_steps"] = f"{epochs}ep"
        if checkpoint.positive("keep_last_n_checkpoints"):
            trainer["save_total_limit"] = checkpoint.shown("keep_last_n_checkpoints")
        if checkpoint.get("save_best") is False:
            trainer["keep_best"] = 0
        if checkpoint.get("save_last") is False:
            self.note("checkpoint.save_last", "`last` always names the newest checkpoint, which takes no space.")
        if "save_type" in checkpoint:
            self.note("checkpoint.save_type", "checkpoints have one format, for any number of processes: there is "
                      "nothing to merge.")  # fmt: skip

    def _resume(self, checkpoint: _Section) -> None:
        given, linked = checkpoint.get("resume_from"), checkpoint.linked("resume_from")
        if given is None:
            return
        where = "checkpoint.resume_from"
        if isinstance(given, str):
            given, linked = {"checkpoint": given}, {"checkpoint": linked}
        resume = _Section(where, given, linked, _KEYS[where])
        source = resume.get("checkpoint", "last")
        if source == "last":
            self.train["resume_from"] = "auto"  # which starts afresh where there is none, as nnScaler does
            return
        if source == "best":
            self.train["resume_from"] = "best"
            self.note(where, "a run without a best checkpoint is an error here, not a fresh start.")
            return
        is_path = isinstance(source, str)
        self.train["resume_from"] = (
            resume.shown("checkpoint") if is_path else _made(_guessed(linked["checkpoint"]), where)
        )
        self.note(where, "it must be a checkpoint of omnitrain. For weights of nnScaler, merge them with its "
                  "Trainer.merge_checkpoint, and pass the file as `init_from` of the trainer.")  # fmt: skip
        for key in ("convert_fn", "with_merged"):
            if key in resume:
                self.note(f"{where}.{key}", "weights are converted by `init_from: {path: ..., convert: ...}`."
                          if key == "convert_fn" else "any number of processes reads any checkpoint.")  # fmt: skip

    def _precision(self) -> None:
        given = self.run.get("precision") or "none"
        if isinstance(given, str):
            given = dict.fromkeys(_TENSORS, given)
        if not isinstance(given, dict):
            raise ConfigError(f"`precision` must be one of {', '.join(_DTYPES)}, or a map of them, got {given!r}.")
        dtypes: dict[str, str] = {}
        for name, dtype in given.items():
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
            self.note("precision", "parameters of fp16 do not train: they stay as they are, and the forward pass is in "
                      "fp16 by `autocast`, with a scaled loss. 'bf16' is converted as it is.")  # fmt: skip
        if dtypes:
            self.trainer["dtypes"] = dtypes

    # --- reports

    def _reports(self) -> None:
        loggers, callbacks = list[Any](), list[Any]()
        for number, plain in enumerate(self.run.get("log", [])):
            linked = self.run.linked("log")
            name = f"log[{number}]"
            found = self._logger(name, self._section(name, plain, linked[number]))
            loggers += [found] if found else []
        if "hook" in self.run:
            found = self._hook()
            callbacks += [found] if found else []
        if callbacks:
            self.trainer["callbacks"] = callbacks
        if loggers:
            self.trainer["loggers"] = loggers
        if self.run.get("enable_progress_bar") is False:
            self.trainer["progress_bar"] = False
            self.note("enable_progress_bar", "false prints nothing. Leave `progress_bar` out for plain lines wherever "
                      "there is no terminal, at `log_steps`.")  # fmt: skip
        elif "log_progress_every_n_train_steps" in self.run:
            self.note("log_progress_every_n_train_steps", "it has no effect beside a progress bar, there either. Rows "
                      "are logged at `log_steps`.")  # fmt: skip

    def _logger(self, name: str, section: _Section) -> dict[str, Any] | None:
        target, given = section.target(), section.arguments()
        kind = target.rpartition(".")[2]
        is_theirs = target == kind or target.startswith("nnscaler.")
        if kind == "WandbLogger" and is_theirs:
            return _call_of("WandbLogger", given, f"{name}.args")
        if kind == "TensorBoardLogger" and is_theirs:
            folder = "/".join(str(given.pop(one)) for one in ("root_dir", "name") if given.get(one))
            for one in sorted(given.keys() - {"root_dir", "name"}):
                self.note(f"{name}.args.{one}", "TensorBoardLogger takes `log_dir` and `every` alone.")
            return _call_of("TensorBoardLogger", {"log_dir": folder} if folder else {}, name)
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
            target, given = section.target(), section.arguments()
            self.note("hook.type", f"derive {target} from omnitrain.TrainHook, which has the same methods." + (
                " Its arguments are passed by name, not as one dict." if given else ""))  # fmt: skip
            return {"class_path": "HookCallback", "init_args": {"hooks": _call_of(target, given, "hook.args")}}
        known = dict.fromkeys((*_HOOKS, *_NEVER_CALLED), _TEXT)
        section, functions = _Section("hook", plain, linked, known), dict[str, Any]()
        for name in plain:
            if name not in section:
                continue
            if name in _NEVER_CALLED:
                self.note(f"hook.{name}", f"it is never called. {_NEVER_CALLED[name].capitalize()}.")
                continue
            if name in _CALLED_WITH_LESS:
                self.note(f"hook.{name}", f"{_CALLED_WITH_LESS[name]} here.")
            functions[name] = {"import_path": _name(section.get(name), f"hook.{name}")}
        return {"class_path": "HookCallback", "init_args": {"hooks": functions}} if functions else None


def _inconsistent(whole: int, micro: int, accumulation: int | None, processes: int | None, plan: int) -> ConfigError:
    """Return the error for numbers that do not make a global batch."""
    replicas = processes // plan if processes else 1
    parts = [f"`micro_batch_size` {micro}"]
    if processes:
        parts.append(
            f"{replicas} replicas (`compute_config.runtime_ngpus` {processes} / `compute_config.plan_ngpus` {plan})"
        )
    if accumulation:
        parts.append(f"`grad_accumulation_steps` {accumulation}")
    made = micro * replicas * (accumulation or 1)
    remedy = " Or leave `runtime_ngpus` out: here the launcher counts the processes." if processes else ""
    must = "that" if accumulation and processes else "a multiple of that"
    return ConfigError(f"`global_batch_size` is {whole}, and {' x '.join(parts)} makes {made}. Make it {must}.{remedy}")


# --- what converted files call


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
    """Return a loader as nnScaler makes it: called with the dataset, the batch size and a sampler.

    The sampler is for one process: each process of a run takes its share of the loader's batches.

    Args:
        loader: The class of the loader, or a function.
        dataset: The dataset. A stream gets no sampler.
        batch_size: Samples in a micro-batch.
        sampler: The class of the sampler, or a function; None is PyTorch's DistributedSampler.
        sampler_args: Its arguments beside `dataset`, `num_replicas` and `rank`.
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
            f"`dataset_sampler` has no effect on {type(dataset).__name__}, a stream, which has an order of its own. "
            "Leave it out."
        )
    return loader(dataset=dataset, batch_size=batch_size, **options)
