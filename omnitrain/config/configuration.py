"""A configuration as a run: what is wrong with it, and the trainer that it describes.

The arguments of a trainer are those of its constructor's signature, and their values are checked as it does. What can
be said without importing what the file names is said first. `parts.py` makes the objects.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrain.argument_aliases import advice
from omnitrain.arguments import DEFAULTS, Settings, check_settings
from omnitrain.config import names
from omnitrain.config.parts import Parts, StandIn, mode_of
from omnitrain.config.reading import OF_A_PART, Place, Tree, read, spelled
from omnitrain.config.yaml_writer import MISSING
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
            raise ConfigError(f"{tree.place(())}: there is no `trainer:` with the arguments of one.")

    @classmethod
    def read(
        cls,
        *files: str | Path,
        overrides: Mapping[str, Any] | Sequence[tuple[str, str | None]] = (),
        trust: bool = False,
    ) -> Config:
        """Read one or several files, of which each is put over those before.

        Args:
            files: YAML files.
            overrides: Values by dotted name, such as {"trainer.learning_rate": 1e-4}; or, as on a command line, pairs
                of a name and a text, of which None removes the key.
            trust: Whether modules may be imported that are neither installed nor in the current folder.

        Raises:
            ConfigError: With file and line.
            MissingExtraError: If PyYAML is not installed.
        """
        return cls.over(merged(files), overrides, trust)

    @classmethod
    def over(
        cls, tree: Tree, overrides: Mapping[str, Any] | Sequence[tuple[str, str | None]] = (), trust: bool = False
    ) -> Config:
        """Return the configuration of files that have been read, which stay as they are; as `read` otherwise."""
        tree = Tree(copy.deepcopy(tree.values), dict(tree.places))
        if isinstance(overrides, Mapping):
            for word, value in overrides.items():
                tree.put(word, value, Place("the overrides"))
        else:
            for word, text in overrides:
                tree.override(word, text, Place(f"--{word}{'!' * (text is None)}"))
        tree.resolve()
        return cls(tree, trust)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the trainer, as they stand in the file."""
        return {name: value for name, value in self.tree.values["trainer"].items() if name != "class_path"}

    def check(self) -> list[ConfigError]:
        """Return everything that is wrong, with file and line; no object is made, and nothing is written.

        Modules that the file names are imported only if nothing else is wrong.
        """
        return self._check_plain() or self._check_parts() or self._check_data()

    def make_trainer(self) -> BaseTrainer:
        """Return the trainer.

        Raises:
            ConfigError: With file and line, for everything that is wrong.
        """
        raise_all(self._check_plain() or self._check_parts())
        building = Parts(self.tree, self.trust, self._seed, makes=True)
        trainer_class = self._trainer_class()
        arguments = building.arguments_of_trainer(trainer_class, self.arguments)
        try:
            return trainer_class(**arguments)
        except OmnitrainError as error:
            if not isinstance(error, ConfigError):
                add_location(error, f"{self.tree.place(('trainer',))}, in {trainer_class.__name__}()")
                raise
            raise ConfigError(f"{self._place_of(error)}: {error}") from error

    def train(self) -> MetricsDict:
        """Make the trainer, train it with the arguments under `train:`, and return what `train()` returns."""
        return self.make_trainer().train(**(self.tree.values.get("train") or {}))

    # --- what is wrong

    @property
    def _seed(self) -> int:
        arguments = self.arguments
        theirs = arguments.get("training_args") or arguments.get("args")
        within = theirs.get("init_args", theirs) if isinstance(theirs, Mapping) else {}
        seed = arguments.get("seed", within.get("seed") if isinstance(within, Mapping) else None)
        return DEFAULTS["seed"] if seed is None else seed

    def _trainer_name(self) -> str:
        name = self.tree.values["trainer"].get("class_path", "Trainer")
        if not isinstance(name, str):
            raise self.tree.error(("trainer", "class_path"), f"a class is named by a text, got {name!r:.100}.")
        short = name.removeprefix("omnitrain.")
        if "." not in short and short not in TRAINERS:
            near = did_you_mean(short, TRAINERS) or " Give the path of a trainer of your own: my.Trainer."
            raise self.tree.error(
                ("trainer", "class_path"), f"there is no trainer {name!r}, but {', '.join(TRAINERS)}.{near}"
            )
        return short

    def _trainer_class(self) -> Any:
        from omnitrain.trainer.base import BaseTrainer

        try:
            path, found = names.find(self._trainer_name(), self.trust)
        except ConfigError as error:
            raise self.tree.error(("trainer", "class_path"), str(error)) from error
        if not isinstance(found, type) or not issubclass(found, BaseTrainer):
            raise self.tree.error(
                ("trainer", "class_path"), f"{path} is no trainer: it does not derive from BaseTrainer."
            )
        return found

    def _check_plain(self) -> list[ConfigError]:
        """Return what is wrong with names and plain values, without torch."""
        empty = [key for key in self.tree.every_key() if self.tree.get(key) == MISSING]
        errors = [self.tree.error(key, f"`{spelled(key)}` has no value ({MISSING}): {_WRITE_IT}") for key in empty]
        try:
            name = self._trainer_name()
        except ConfigError as error:
            return [*errors, error]
        given = dict(self.arguments)
        known = [*DEFAULTS, "model"]
        if name == "Trainer":
            errors += self._unknown(name, [one for one in given if one not in known], known)
        errors += self._unknown("train()", [one for one in self.tree.values.get("train") or {} if one not in _OF_TRAIN],
                                _OF_TRAIN, "train")  # fmt: skip
        started = self.tree.values.get("train") or {}
        if not isinstance(started.get("resume_from"), (str, type(None))):
            wrong = started["resume_from"]
            errors.append(
                self.tree.error(("train", "resume_from"), f"`resume_from` must be a text, got {wrong!r:.100}.")
            )
        of_lists = self._check_lists(given)
        errors += of_lists.values()
        plain = {
            one: _stand_ins(value, one)
            for one, value in given.items()
            if one in DEFAULTS and value != MISSING and one not in of_lists
        }
        for _ in range(len(plain) + 1):
            try:
                settings = Settings.of(plain)
                check_settings(settings)
                Limits(settings.epochs, settings.max_steps, settings.max_duration)
            except ConfigError as error:
                errors.append(ConfigError(f"{self._place_of(error)}: {error}"))
                named = [one for one in re.findall(r"`(\w+)", str(error)) if one in plain]
                if not named:
                    break
                del plain[named[0]]
            else:
                break
        return errors

    def _check_lists(self, given: Mapping[str, Any]) -> dict[str, ConfigError]:
        """Return, by argument, the first error in those that hold objects: an entry, or the list, that makes none."""
        found: dict[str, ConfigError] = {}
        for name in ("callbacks", "algorithms", "loggers"):
            value = given.get(name)
            if value is None or value == MISSING or (name == "loggers" and _is_part(value)):
                continue
            if not isinstance(value, list):
                remedy = " Make it an entry of one." if _is_part(value) else ""
                found[name] = self.tree.error(
                    ("trainer", name), f"`{name}` must be a list, got {value!r:.100}.{remedy}"
                )
                continue
            for number, one in enumerate(value):
                if not _is_part(one):
                    found[name] = self.tree.error(
                        ("trainer", name, number),
                        f"`{name}` holds objects, each named by a text or by `class_path` and `init_args`, got "
                        f"{one!r:.100}.",
                    )
                    break
        return found

    def _unknown(
        self, who: str, unknown: Iterable[str], known: Sequence[str], section: str = "trainer"
    ) -> list[ConfigError]:
        found = []
        for one in unknown:
            hint = advice(str(one), list(known)) if section == "trainer" else ""
            hint = hint or did_you_mean(str(one), known)
            found.append(self.tree.error((section, one), f"{who} has no argument {one!r}.{hint}"))
        return found

    def _check_parts(self) -> list[ConfigError]:
        building = Parts(self.tree, self.trust, self._seed, makes=False)
        try:
            trainer_class = self._trainer_class()
        except ConfigError as error:
            return [error]
        known = [name for name in inspect.signature(trainer_class).parameters if name != "unknown"]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(trainer_class).parameters.values())
        if not takes_any:
            refused = getattr(trainer_class, "REFUSED", {})
            unknown = [one for one in self.arguments if one not in known]
            errors = [self.tree.error(("trainer", one), f"`{one}` {refused[one]}") for one in unknown if one in refused]
            errors += self._unknown(trainer_class.__name__, [one for one in unknown if one not in refused], known)
            if errors:
                return errors
        if errors := self._missing_arguments(trainer_class):
            return errors
        building.arguments_of_trainer(trainer_class, self.arguments)
        return building.errors

    def _missing_arguments(self, trainer_class: Any) -> list[ConfigError]:
        """Return the errors for arguments that the trainer requires."""
        parameters = inspect.signature(trainer_class).parameters
        required = [name for name, one in parameters.items() if one.default is one.empty and one.kind in _BY_NAME]
        missing = [name for name in required if self.arguments.get(name) is None]
        if "model_init" in parameters and self.arguments.get("model") is self.arguments.get("model_init") is None:
            missing.append("model")
        remedies = {"model": "Write the path of its class and its arguments."}
        return [
            self.tree.error(
                ("trainer", name), f"{trainer_class.__name__} needs `{name}`. {remedies.get(name, '')}".strip()
            )
            for name in missing
        ]

    def _check_data(self) -> list[ConfigError]:
        """Return the error for a file with nothing to train on, unless the trainer has its own constructor or loop."""
        from omnitrain.trainer.hooks import Hooks

        trainer_class = self._trainer_class()
        is_ours = {"train_dataset", "train_loader"} <= inspect.signature(trainer_class).parameters.keys()
        has_data = any(self.arguments.get(name) is not None for name in ("train_dataset", "train_loader"))
        if has_data or not is_ours or trainer_class._train_epoch is not Hooks._train_epoch:
            return []
        return [
            self.tree.error(("trainer",), "there is nothing to train on. Write `train_dataset` or `train_loader` here.")
        ]

    def _place_of(self, error: Exception) -> Place:
        """Return the place of the first argument that a message names."""
        for name in re.findall(r"`(\w+)", str(error)):
            if name in self.tree.values["trainer"]:
                return self.tree.place(("trainer", name))
        return self.tree.place(("trainer",))


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OF_TRAIN = ("resume_from", "allow_change", "more")
_WRITE_IT = "the run that wrote this file was made in Python, and its part has no name. Write one here."


def _is_part(value: Any) -> bool:
    """Return whether a value can stand for an object."""
    return isinstance(value, str) or (isinstance(value, Mapping) and not value.keys().isdisjoint(OF_A_PART))


def _stand_ins(value: Any, name: str) -> Any:
    if isinstance(value, Mapping) and not value.keys().isdisjoint(OF_A_PART):
        return StandIn if name == "optimizer" and "import_path" in value else StandIn()
    if name in _NAMES_OBJECTS and isinstance(value, str):
        return StandIn()
    if isinstance(value, list):
        return [_stand_ins(one, "") for one in value]
    if isinstance(value, dict):
        return {key: _stand_ins(one, "") for key, one in value.items()}
    return value


_NAMES_OBJECTS = frozenset(
    name for name, one in inspect.signature(Settings).parameters.items()
    if mode_of(one.annotation, name.endswith(("_dataset", "_loader", "_class"))) != "text"
)  # fmt: skip
"""Arguments of a trainer for which a text is the name of something."""


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise one error for all, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(f"{len(errors)} errors:\n" + "\n".join(f"  {error}" for error in errors))


def _check_not_nnscaler(tree: Tree) -> None:
    """Raise ConfigError for a file of nnScaler's trainer, whose names stand without sections."""
    names_there = tree.values.keys()
    if "compute_config" in names_there or {"model", "dataset"} <= names_there:
        source = tree.place(("model",)).source
        raise ConfigError(
            f"{source}: this is a configuration of nnScaler's trainer: it has `model`, `dataset` or `compute_config` "
            f"without `trainer:`. Convert it with `omnitrain config convert {source} > converted.yaml`, and give that."
        )


def merged(files: Sequence[str | Path]) -> Tree:
    """Read files, of which each is put over those before."""
    tree = Tree()
    for file in files:
        tree.merge(_flat(read(file)))
    return tree


def _flat(tree: Tree) -> Tree:
    """Put the arguments of the trainer beside its class, where they stand under `init_args`."""
    trainer = tree.values.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("init_args"), dict):
        inner = trainer.pop("init_args")
        for name, value in inner.items():
            if name in trainer:
                raise tree.error(
                    ("trainer", "init_args", name), f"{name!r} stands under `trainer` as well. Leave one out."
                )
            trainer[name] = value
        tree.places = {
            ("trainer", *key[2:]) if key[:2] == ("trainer", "init_args") and len(key) > 2 else key: place
            for key, place in tree.places.items()
        }
    return tree
