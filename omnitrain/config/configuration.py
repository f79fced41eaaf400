"""Configurations of runs: their errors, and the trainer they describe.

The arguments of a trainer are those of its constructor's signature, and are checked as it checks them. Errors that can
be found without importing the modules in the file come first. `parts.py` builds the objects.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrain.argument_aliases import advice
from omnitrain.arguments import DEFAULTS, Settings, check_settings
from omnitrain.config import names
from omnitrain.config.parts import Parts, Placeholder, text_mode
from omnitrain.config.plain_yaml import MISSING
from omnitrain.config.reading import SourceLocation, Tree, dotted_name, has_part_keys, read
from omnitrain.core.duration import Limits
from omnitrain.core.errors import ConfigError, OmnitrainError, add_location, did_you_mean

if TYPE_CHECKING:
    from omnitrain.core.history import MetricsDict
    from omnitrain.trainer.base import BaseTrainer

SECTIONS = ("vars", "trainer", "train")
TRAINERS = ("Trainer", "AccelerateTrainer", "HFTrainer")


class Config:
    """The description of a run.

    Args:
        tree: Its values, with references resolved.
        trust: Whether modules may be imported that are neither installed nor in the current folder.

    Raises:
        ConfigError: If a section is unknown, or the file is one of nnScaler.
    """

    def __init__(self, tree: Tree, trust: bool = False) -> None:
        self.tree: Tree = tree
        self.trust: bool = trust
        _check_not_nnscaler(tree)
        for name in tree.values:
            if name not in SECTIONS:
                near = did_you_mean(str(name), SECTIONS)
                is_argument = name in DEFAULTS or name in ("model", "class_path")
                hint = " It is an argument of the trainer: write it under `trainer:`." if is_argument else near
                raise tree.error((name,), f"unknown section {name!r}. There are {', '.join(SECTIONS)}.{hint}")
        for name in SECTIONS:
            if not isinstance(tree.values.get(name) or {}, dict):
                raise tree.error((name,), f"`{name}` must hold names with values, got {tree.values[name]!r:.100}.")
        if not tree.values.get("trainer"):
            raise ConfigError(f"{tree.location(())}: there is no `trainer:` with the arguments of one.")

    @classmethod
    def read(
        cls,
        *files: str | Path,
        overrides: Mapping[str, Any] | Sequence[tuple[str, str | None]] = (),
        trust: bool = False,
    ) -> Config:
        """Read one or several files, later ones over earlier ones.

        Args:
            files: YAML files.
            overrides: Values by dotted name, such as {"trainer.learning_rate": 1e-4}; or, as on a command line, pairs
                of a name and a text, of which None removes the key.
            trust: Whether modules may be imported that are neither installed nor in the current folder.

        Raises:
            ConfigError: With file and line.
            MissingExtraError: If PyYAML is not installed.
        """
        return cls.from_tree(merge_files(files), overrides, trust)

    @classmethod
    def from_tree(
        cls, tree: Tree, overrides: Mapping[str, Any] | Sequence[tuple[str, str | None]] = (), trust: bool = False
    ) -> Config:
        """Return the configuration of files that have been read, which stay unchanged; otherwise as `read`."""
        tree = Tree(tree.values, tree.locations)  # whose methods make new values
        if isinstance(overrides, Mapping):
            for path, value in overrides.items():
                tree.put(path, value, SourceLocation("the overrides"))
        else:
            for path, text in overrides:
                tree.override(path, text, SourceLocation(f"--{path}{'!' * (text is None)}"))
        tree.resolve()
        return cls(tree, trust)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the trainer, as written in the file."""
        return {name: value for name, value in self.tree.values["trainer"].items() if name != "class_path"}

    def check(self) -> list[ConfigError]:
        """Return all errors, with file and line; no object is built, and nothing is written.

        Modules in the file are imported only if there is no other error.
        """
        return self._check_plain() or self._check_parts() or self._check_data()

    def make_trainer(self) -> BaseTrainer:
        """Return the trainer.

        Raises:
            ConfigError: With file and line, for everything that is wrong.
        """
        raise_all(self._check_plain() or self._check_parts())
        parts = Parts(self.tree, self.trust, self._seed, makes=True)
        trainer_class = self._trainer_class()
        arguments = parts.build_arguments(trainer_class, self.arguments)
        try:
            return trainer_class(**arguments)
        except OmnitrainError as error:
            if not isinstance(error, ConfigError):
                add_location(error, f"{self.tree.location(('trainer',))}, in {trainer_class.__name__}()")
                raise
            raise ConfigError(f"{self._find_location(error)}: {error}") from error

    def train(self) -> MetricsDict:
        """Make the trainer, train it with the arguments under `train:`, and return what `train()` returns."""
        return self.make_trainer().train(**(self.tree.values.get("train") or {}))

    # --- errors

    @property
    def _seed(self) -> int:
        arguments = self.arguments
        theirs = arguments.get("training_args") or arguments.get("args")
        inner = theirs.get("init_args", theirs) if isinstance(theirs, Mapping) else {}
        seed = arguments.get("seed", inner.get("seed") if isinstance(inner, Mapping) else None)
        return DEFAULTS["seed"] if seed is None else seed

    def _trainer_name(self) -> str:
        name = self.tree.values["trainer"].get("class_path", "Trainer")
        if not isinstance(name, str):
            raise self.tree.error(("trainer", "class_path"), f"a class is named by a text, got {name!r:.100}.")
        short = name.removeprefix("omnitrain.")
        if "." not in short and short not in TRAINERS:
            near = did_you_mean(short, TRAINERS) or " Give the path of a custom trainer: my.Trainer."
            raise self.tree.error(
                ("trainer", "class_path"), f"there is no trainer {name!r}, but {', '.join(TRAINERS)}.{near}"
            )
        return short

    def _trainer_class(self) -> Any:
        from omnitrain.trainer.base import BaseTrainer

        try:
            path, trainer_class = names.find(self._trainer_name(), self.trust)
        except ConfigError as error:
            raise self.tree.error(("trainer", "class_path"), str(error)) from error
        if not isinstance(trainer_class, type) or not issubclass(trainer_class, BaseTrainer):
            message = f"{path} is no trainer: it does not derive from BaseTrainer."
            raise self.tree.error(("trainer", "class_path"), message)
        return trainer_class

    def _check_plain(self) -> list[ConfigError]:
        """Return the errors in names and plain values, without torch."""
        empty = [key for key in self.tree.iter_keys() if self.tree.get(key) == MISSING]
        errors = [self.tree.error(key, f"`{dotted_name(key)}` has no value ({MISSING}): {_REMEDY}") for key in empty]
        try:
            name = self._trainer_name()
        except ConfigError as error:
            return [*errors, error]
        arguments = dict(self.arguments)
        known = [*DEFAULTS, "model"]
        if name == "Trainer":
            errors += self._unknown(name, [arg for arg in arguments if arg not in known], known)
        train_arguments = self.tree.values.get("train") or {}
        unknown = [arg for arg in train_arguments if arg not in _TRAIN_ARGUMENTS]
        errors += self._unknown("train()", unknown, _TRAIN_ARGUMENTS)
        if not isinstance(resume_from := train_arguments.get("resume_from"), (str, type(None))):
            message = f"`resume_from` must be a text, got {resume_from!r:.100}."
            errors.append(self.tree.error(("train", "resume_from"), message))
        for arg in ("callbacks", "algorithms", "loggers"):
            entries = arguments.get(arg)
            if isinstance(entries, list):
                message = f"`{arg}` holds objects, each named by a text or by `class_path` and `init_args`, got "
                errors += [
                    self.tree.error(("trainer", arg, number), f"{message}{entry!r:.100}.")
                    for number, entry in enumerate(entries) if not _is_part(entry)
                ]  # fmt: skip
            elif entries is not None and entries != MISSING and not (arg == "loggers" and _is_part(entries)):
                remedy = " Make it an entry of one." if _is_part(entries) else ""
                message = f"`{arg}` must be a list, got {entries!r:.100}.{remedy}"
                errors.append(self.tree.error(("trainer", arg), message))
                del arguments[arg]
        plain = {
            arg: _insert_placeholders(value, arg)
            for arg, value in arguments.items()
            if arg in DEFAULTS and value != MISSING
        }
        for _ in range(len(plain) + 1):
            try:
                settings = Settings.of(plain)
                check_settings(settings)
                Limits(settings.epochs, settings.max_steps, settings.max_duration)
            except ConfigError as error:
                errors.append(ConfigError(f"{self._find_location(error)}: {error}"))
                rejected = [arg for arg in re.findall(r"`(\w+)", str(error)) if arg in plain]
                if not rejected:
                    break
                del plain[rejected[0]]
            else:
                break
        return errors

    def _unknown(self, callee: str, unknown: Iterable[str], known: Sequence[str]) -> list[ConfigError]:
        section = "train" if callee == "train()" else "trainer"
        hints = {arg: advice(str(arg), list(known)) if section == "trainer" else "" for arg in unknown}
        return [
            self.tree.error((section, arg), f"{callee} has no argument {arg!r}.{hint or did_you_mean(str(arg), known)}")
            for arg, hint in hints.items()
        ]

    def _check_parts(self) -> list[ConfigError]:
        parts = Parts(self.tree, self.trust, self._seed, makes=False)
        try:
            trainer_class = self._trainer_class()
        except ConfigError as error:
            return [error]
        parameters = inspect.signature(trainer_class).parameters
        known = [name for name in parameters if name != "unknown"]
        if not any(param.kind is param.VAR_KEYWORD for param in parameters.values()):
            reasons = getattr(trainer_class, "REFUSED", {})
            unknown = [arg for arg in self.arguments if arg not in known]
            errors = [self.tree.error(("trainer", arg), f"`{arg}` {reasons[arg]}") for arg in unknown if arg in reasons]
            errors += self._unknown(trainer_class.__name__, [arg for arg in unknown if arg not in reasons], known)
            if errors:
                return errors
        required = names.missing_parameters(trainer_class, ())
        missing = [name for name in required if self.arguments.get(name) is None]
        if "model_init" in parameters and self.arguments.get("model") is self.arguments.get("model_init") is None:
            missing.append("model")
        if missing:
            needs = f"{trainer_class.__name__} needs"
            return [
                self.tree.error(("trainer", name), f"{needs} `{name}`. Write it under `trainer`.") for name in missing
            ]
        parts.build_arguments(trainer_class, self.arguments)
        return parts.errors

    def _check_data(self) -> list[ConfigError]:
        """Return the error for a file without training data, unless the trainer has a custom constructor or loop."""
        from omnitrain.trainer.hooks import Hooks

        trainer_class = self._trainer_class()
        is_ours = {"train_dataset", "train_loader"} <= inspect.signature(trainer_class).parameters.keys()
        has_data = any(self.arguments.get(name) is not None for name in ("train_dataset", "train_loader"))
        if has_data or not is_ours or trainer_class._train_epoch is not Hooks._train_epoch:
            return []
        return [
            self.tree.error(("trainer",), "there is nothing to train on. Write `train_dataset` or `train_loader` here.")
        ]

    def _find_location(self, error: Exception) -> SourceLocation:
        for name in re.findall(r"`(\w+)", str(error)):
            if name in self.tree.values["trainer"]:
                return self.tree.location(("trainer", name))
        return self.tree.location(("trainer",))


_TRAIN_ARGUMENTS = ("resume_from", "allow_change", "more")
_REMEDY = "the run that wrote this file was made in Python, and its part has no name. Write one here."


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or has_part_keys(value)


def _insert_placeholders(value: Any, name: str) -> Any:
    if has_part_keys(value):
        return Placeholder if name == "optimizer" and "import_path" in value else Placeholder(value)
    if name in _OBJECT_ARGUMENTS and isinstance(value, str):
        return Placeholder(value)
    if isinstance(value, list):
        return [_insert_placeholders(entry, "") for entry in value]
    if isinstance(value, dict):
        return {key: _insert_placeholders(entry, "") for key, entry in value.items()}
    return value


# Arguments of a trainer for which a text is the name of something.
_OBJECT_ARGUMENTS = frozenset(
    name for name, param in inspect.signature(Settings).parameters.items()
    if text_mode(param.annotation, name.endswith(("_dataset", "_loader", "_class"))) != "text"
)  # fmt: skip


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise one error for all, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(f"{len(errors)} errors:\n" + "\n".join(f"  {error}" for error in errors))


def _check_not_nnscaler(tree: Tree) -> None:
    keys = tree.values.keys()
    if "compute_config" in keys or {"model", "dataset"} <= keys:
        source = tree.location(("model",)).source
        raise ConfigError(
            f"{source}: this is a configuration of nnScaler's trainer: it has `model`, `dataset` or `compute_config` "
            f"without `trainer:`. Convert it with `omnitrain config convert {source} > converted.yaml`, and give that."
        )


def merge_files(files: Sequence[str | Path]) -> Tree:
    """Read files and merge them, later ones over earlier ones."""
    tree = Tree()
    for file in files:
        tree.merge(_flatten_init_args(read(file)))
    return tree


def _flatten_init_args(tree: Tree) -> Tree:
    """Move the arguments of the trainer from `init_args` to its class."""
    trainer, prefix = tree.values.get("trainer"), ("trainer", "init_args")
    if not isinstance(trainer, dict) or not isinstance(trainer.get("init_args"), dict):
        return tree
    for name, value in trainer.pop("init_args").items():
        if name in trainer:
            raise tree.error((*prefix, name), f"{name!r} stands under `trainer` as well. Leave one out.")
        trainer[name] = value
    is_inner = {key: key[:2] == prefix and len(key) > 2 for key in tree.locations}
    tree.locations = {
        ("trainer", *key[2:]) if is_inner[key] else key: location for key, location in tree.locations.items()
    }
    return tree
