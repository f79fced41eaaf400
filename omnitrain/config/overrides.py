"""Changes to the trainers of a program from its environment.

`omnitrain.diagnostics` runs a user's script unchanged, and hands in by one variable what has to differ. Nothing here is
called without that variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from omnitrain.config.names import import_object
from omnitrain.core.errors import OmnitrainError
from omnitrain.core.files import replace_file

VARIABLE = "OMNITRAIN_OVERRIDES"
"""The environment variable with `Overrides` as JSON."""


class Rehearsal(TypedDict):
    """A call on a trainer that is about to train."""

    function: str
    """The dotted name of a function of the trainer, which returns JSON types."""
    arguments: dict[str, Any]
    """Its other arguments."""
    path: str
    """The JSON file to which the main rank writes the "result", or the "problem"; its folder is temporary."""


class Overrides(TypedDict, total=False):
    """What differs from the user's program; every entry may be missing."""

    save_dir: str
    """The folder for everything that the trainers write: `run-1` for the first, `run-2` for the next, and so on."""
    resume: bool
    """Whether `train()` resumes from the newest checkpoint in the folder, if there is one."""
    resume_from: str
    """From where the first `train()` of a trainer resumes, whatever the script says; "" starts afresh."""
    callbacks: list[dict[str, Any]]
    """More callbacks, each as {"class_path": ..., "init_args": {...}}."""
    arguments: dict[str, Any]
    """Arguments of the constructors."""
    trainer: str
    """The public class in place of the script's: "Trainer", "AccelerateTrainer" or "HFTrainer"."""
    rehearsal: Rehearsal
    """What the first `train()` does instead of training; then the process ends."""


# Arguments that transformers calls by another name.
_TRAINING_FIELDS = {"batch_size": "per_device_train_batch_size"}

# The folder of each run by the `save_dir` of the script, made absolute.
_folders: dict[str, Path] = {}
# The number of trainers so far.
_count = 0
# The folders that did not exist before the first trainer of a rehearsal, from the innermost one.
_missing_folders: list[Path] = []


def is_active() -> bool:
    """Return whether the environment has overrides."""
    return VARIABLE in os.environ


def read_overrides() -> Overrides:
    """Return the overrides of this process."""
    return json.loads(os.environ[VARIABLE])


@contextlib.contextmanager
def applied(overrides: Overrides) -> Iterator[None]:
    """Apply overrides to the trainers that this process makes inside."""
    global _count
    before, folders, count = os.environ.get(VARIABLE), dict(_folders), _count
    _folders.clear()
    os.environ[VARIABLE] = json.dumps(overrides)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
        _folders.clear()
        _folders.update(folders)
        _count = count


def replace_class(trainer: Any, arguments: dict[str, Any]) -> bool:
    """Make a trainer of ours one of another class, if that is an override; arguments that it lacks are left out."""
    name, own_class = read_overrides().get("trainer"), type(trainer)
    if name in (None, own_class.__name__) or not own_class.__module__.startswith("omnitrain."):
        return False
    kind: Any = import_object(f"omnitrain.{name}")
    training_args = (
        None if kind.__name__ == "HFTrainer" else arguments.pop("training_args", arguments.pop("args", None))
    )
    if training_args is not None:
        import_object("omnitrain.hf.arguments.translate_training_args")(training_args, arguments)
        # scripts call it with transformers' arguments, which the other trainers do not know
        vars(trainer)["train"] = lambda *args, **kwargs: kind.train(trainer)
    trainer.__class__ = kind
    kind.__init__(
        trainer, **{name: value for name, value in arguments.items() if name not in getattr(kind, "REFUSED", {})}
    )
    return True


def override_arguments(trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer with all overrides."""
    overrides, arguments = read_overrides(), dict(arguments)
    training_args = next((value for value in arguments.values() if hasattr(value, "output_dir")), None)
    if "rehearsal" in overrides and training_args is not None:
        folder = Path(training_args.output_dir).absolute()
        _missing_folders.extend(path for path in (folder, *folder.parents) if not path.exists())
    if "save_dir" in overrides:
        _redirect(arguments, training_args, Path(overrides["save_dir"]))
    if extra := overrides.get("callbacks"):
        callbacks = arguments.get("callbacks", ())
        callbacks = () if callbacks is None else callbacks
        if isinstance(callbacks, Iterable):  # otherwise the constructor rejects it
            parts = [import_object(part["class_path"])(**part.get("init_args", {})) for part in extra]
            arguments["callbacks"] = [*callbacks, *parts]
    values = dict(overrides.get("arguments", {}))
    for name in list(values) if training_args is not None else ():
        field = _TRAINING_FIELDS.get(name, name)
        if hasattr(training_args, field) and arguments.get(name) is None:  # both would contradict each other
            setattr(training_args, field, values.pop(name))
    return arguments | values


def _redirect(arguments: dict[str, Any], training_args: Any, root: Path) -> None:
    """Have a trainer write below `root` only, and send nothing to services."""
    global _count
    _count += 1
    original = arguments.get("save_dir")
    if original is None and training_args is not None:
        original = training_args.output_dir
    key = f"run {_count}" if original is None else _absolute(original)
    if key not in _folders or arguments.get("overwrite"):  # or a second trainer continues in the folder of the first
        _folders[key] = root / f"run-{_count}"
    folder = str(_folders[key])
    for part in (*_listed(arguments.get("callbacks")), *_listed(arguments.get("loggers"))):
        if isinstance(part, import_object("omnitrain.loggers.rows.RowFile")) and os.path.isabs(part.filename):
            part.filename = os.path.basename(part.filename)  # a fresh run would begin the user's file again
    if any(not _is_file_logger(logger) for logger in _listed(arguments.get("loggers"))):
        arguments["loggers"] = [logger for logger in _listed(arguments["loggers"]) if _is_file_logger(logger)]
    if training_args is None:
        arguments["save_dir"] = folder
        return
    # in place: a script reads `training_args.output_dir` after it has trained
    training_args.output_dir = folder
    if "save_dir" in arguments:
        arguments["save_dir"] = folder
    strategy = training_args.save_strategy
    if getattr(strategy, "value", strategy) == "no":
        training_args.save_strategy = type(strategy)("epoch")
    training_args.report_to, training_args.push_to_hub = [], False


def _listed(parts: Any) -> list[Any]:
    return [] if parts is None else list(parts) if isinstance(parts, (list, tuple)) else [parts]


def _is_file_logger(logger: Any) -> bool:
    return logger in ("csv",) if isinstance(logger, str) else hasattr(logger, "filename")


def override_run(trainer: Any, resume_from: Any, more: Any) -> Any:
    """Return from where a call of `train()` resumes; each further call of a trainer has a folder of its own."""
    overrides, attributes = read_overrides(), vars(trainer)
    if "rehearsal" in overrides:
        _rehearse(trainer, overrides["rehearsal"])
    calls = attributes["_calls_of_train"] = attributes.get("_calls_of_train", 0) + 1
    attributes["_resume_from"] = resume_from
    if "resume_from" in overrides and calls == 1:
        return overrides["resume_from"] or None
    if "save_dir" not in overrides:
        return resume_from
    if calls > 1:
        _change_folder(trainer, trainer.save_dir.with_name(f"{trainer.save_dir.name.split('.')[0]}.{calls}"))
    if more is not None:  # which continues the run of the call before: a killed one begins from there again
        if trainer.is_main_process and calls > 1:
            shutil.rmtree(trainer.save_dir, ignore_errors=True)
        return resume_from
    if isinstance(resume_from, (str, os.PathLike)) and resume_from not in ("auto", "last", "best"):
        resume_from = _moved(resume_from)
        if Path(resume_from).is_relative_to(overrides["save_dir"]):
            return resume_from
    if overrides.get("resume") and trainer.ranks.on_main("the checkpoints of a rehearsal", trainer.store.checkpoints):
        return "auto"
    return "auto" if resume_from == "auto" else resume_from


def _rehearse(trainer: Any, rehearsal: Rehearsal) -> NoReturn:
    """Write the result of a call on a trainer, or what it has raised, and end the process."""
    try:
        answer = {"result": import_object(rehearsal["function"])(trainer, **rehearsal["arguments"])}
    except Exception as error:
        answer = {"problem": str(error) if isinstance(error, OmnitrainError) else f"{type(error).__name__}: {error}"}
    if trainer.is_main_process:
        replace_file(Path(rehearsal["path"]), json.dumps(answer).encode(), sync=False)
        for folder in _missing_folders:  # transformers makes the folder of a run with its trainer
            with contextlib.suppress(OSError):
                folder.rmdir()
    raise SystemExit(0)


def describe_run(trainer: Any) -> dict[str, Any]:
    """Return what the script itself has given for a run: its `save_dir`, and what it resumes from."""
    save_dir = vars(trainer)["save_dir"]
    original = next((name for name, folder in _folders.items() if folder == save_dir), "run")
    is_supplied = original.startswith("run")
    resume_from = vars(trainer).get("_resume_from")
    return {"save_dir": None if is_supplied else original, "resume_from": resume_from and str(resume_from)}


def _change_folder(trainer: Any, folder: Path) -> None:
    store = type(trainer.store)(folder)
    trainer.settings = dataclasses.replace(trainer.settings, save_dir=folder)
    vars(trainer).update(store=store, save_dir=folder)
    trainer._checkpointer.store = store


def override_model_folder(path: str | Path) -> str | Path:
    """Return where a model is written instead of the folder that a script names."""
    overrides = read_overrides()
    root = overrides.get("save_dir")
    if root is None and "rehearsal" in overrides:
        root = os.path.dirname(overrides["rehearsal"]["path"])
    if root is None:
        return path
    target = _moved(path)
    return (
        target if target.is_relative_to(root) else Path(root) / "models" / _absolute(path).strip("/").replace("/", "_")
    )


def _moved(path: str | os.PathLike[str]) -> Path:
    """Return the place of a path below the `save_dir` of a trainer, or the path itself."""
    for original, folder in _folders.items():
        if Path(_absolute(path)).is_relative_to(original):
            return folder / Path(_absolute(path)).relative_to(original)
    return Path(path)


def _absolute(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
