"""The laws of CONTRIBUTING.md that a machine can check: floors, circles, imports, public names, objects, docstrings.

Guards of size count the functions and files that a step, an evaluation, a save, a load and a resume enter; no cap on
the length of a function, of a class or of a file makes anybody cut one subject in two.
"""

import argparse
import ast
import collections
import contextlib
import functools
import gc
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import programs
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import omnitrain
from omnitrain.cli import main

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "omnitrain"

FLOORS = {
    0: "core",
    1: "argument_aliases arguments compute config.instantiation config.names config.overrides config.plain_yaml data "
    "distributed metrics optim",
    2: "algorithms backends callbacks checkpoint loggers model",
    3: "trainer diagnostics.check diagnostics.data_checks diagnostics.findings diagnostics.learning_checks "
    "diagnostics.mixing_checks diagnostics.pass_probe diagnostics.plan diagnostics.rehearsal",
    4: "diagnostics hf sweeps",
    5: "cli config contrib __main__",
}
"""The rooms of each floor; files that lower rooms use too lie deeper than the others of config/ and diagnostics/."""
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
NO_TORCH = [
    "omnitrain.arguments",
    "omnitrain.trainer.lifecycle",
    *(f"omnitrain.checkpoint.{name}" for name in ["lock", "manifest", "safetensors_header", "store"]),
    *(f"omnitrain.core.{path.stem}" for path in sorted((PACKAGE / "core").glob("[!_]*.py"))),
]
TORCH_ON_FIRST_USE = [f"omnitrain.{name}" for name in ("cli.main", "cli.checkpoint", "contrib.nnscaler", "cli.launch")]
HEAVY = {
    "accelerate", "deepspeed", "matplotlib", "optuna", "sklearn", "tensorboard", "transformers", "torchmetrics",
    "wandb", "yaml",
}  # fmt: skip
LOADED_ON_FIRST_USE = {"AccelerateTrainer", "HFTrainer", "HFTrainingArguments"}

MAX_WALKS = {
    "Trainer": {"step": (87, 18), "evaluate": (97, 19), "save": (154, 29), "load": (160, 20), "resume": (726, 59)},
    "AccelerateTrainer": {"step": (90, 19), "evaluate": (97, 20)},
    "HFTrainer": {"step": (130, 24), "evaluate": (118, 25)},
}
"""The most functions, and files of the package, that a step, an evaluation, a save, a load or a resume enters.

A resume trains one step and closes the run.
"""
WITHOUT_CONTENT = {
    "one", "found", "own", "held", "kept", "told", "said", "there", "left", "given",
    "made", "taken", "seen", "wanted", "named", "meant", "then", "now", "here", "others",
}  # fmt: skip
MAX_SHARE_WITHOUT_CONTENT = 0.002
MAX_HEAD_WORDS = 12
MAX_LEVELS = 4
MAX_BRANCHES_ON_A_BACKEND = 5
MAX_SHARED_ATTRIBUTES = 5
"""The most attributes of an object that are assigned by methods of two of its classes."""


class Import(NamedTuple):
    """A module that a module imports, whether that ever runs (False under TYPE_CHECKING), and on which line."""

    target: str
    runs: bool
    line: int


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def tree_of(module: str) -> ast.Module:
    return parsed(MODULES[module])


def targets_of(module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
        base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [node.module])])
    # The version is a constant at the top of the package; whoever writes files may read it.
    names = [alias.name for alias in node.names if (base, alias.name) != ("omnitrain", "__version__")]
    return [f"{base}.{name}" if f"{base}.{name}" in MODULES else base for name in names]


@functools.cache
def imports_of(module: str) -> list[Import]:
    """Return what the module imports anywhere, inside functions and for type checkers too."""

    def walk(nodes: list[ast.stmt] | list[ast.AST], runs: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target in targets_of(module, node):
                    yield Import(target, runs, node.lineno)
            elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from walk(node.body, False)
                yield from walk(node.orelse, runs)
            else:
                parts = ast.stmt | ast.ExceptHandler | ast.match_case  # an expression imports nothing
                yield from walk([child for child in ast.iter_child_nodes(node) if isinstance(child, parts)], runs)

    return list(walk(tree_of(module).body, True))


def own_imports_of(module: str) -> list[Import]:
    """Return what the module imports from the package; the package itself, which names everything, imports nothing."""
    return [target for target in imports_of(module) if target.target.startswith("omnitrain.") and module != "omnitrain"]


def floor_of(module: str) -> int:
    """Return the floor a module lives on; the package itself, which names everything, is on the highest."""
    name = module.removeprefix("omnitrain").removeprefix(".")
    return FLOOR_OF.get(name, FLOOR_OF[name.split(".")[0]]) if name else max(FLOORS)


LOADED = "print(*{name.split('.')[0] for name in sys.modules})"
WITHOUT_TRANSFORMERS = """
sys.modules["transformers"] = None
for name in ("HFTrainer", "HFTrainingArguments"):
    try:
        getattr(omnitrain, name)
    except ImportError as error:
        print(type(error).__name__, error)
"""


@functools.cache
def imported() -> list[str]:
    """Return the top-level packages in memory after three imports in a fresh Python, and two errors.

    These are the imports of the package, of modules without torch, and of all names that need no optional package; the
    errors those of names whose package is missing.
    """
    names = sorted(set(omnitrain.__all__) - LOADED_ON_FIRST_USE)
    modules = f"import {', '.join(NO_TORCH + TORCH_ON_FIRST_USE)}"
    statements = ["import sys, omnitrain", modules, f"from omnitrain import {', '.join(names)}"]
    result = programs.run(
        sys.executable, "-c", "\n".join([*(f"{line}\n{LOADED}" for line in statements), WITHOUT_TRANSFORMERS]), cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


# Imports


def test_imports_go_down_only() -> None:
    assert not [
        f"{MODULES[module].name}:{target.line} imports {target.target}"
        for module in MODULES
        for target in own_imports_of(module)
        if floor_of(target.target) > floor_of(module)
    ]


def test_imports_have_no_circles() -> None:
    graph = {module: {target.target for target in own_imports_of(module)} - {module} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_torch_modules_do_not_load_torch() -> None:
    assert "torch" not in imported()[1].split()
    for module in NO_TORCH:  # in functions neither
        assert "torch" not in {target.target.split(".")[0] for target in imports_of(module) if target.runs}, module


def test_import_loads_no_optional_package() -> None:
    package, _, names = (set(line.split()) for line in imported()[:3])
    assert not package & {"torch", *HEAVY} and not names & HEAVY and "torch" in names


def test_import_leaves_garbage_collection_as_it_was() -> None:
    """It is off while modules are imported."""
    for is_enabled in (False, True):
        (gc.enable if is_enabled else gc.disable)()
        try:
            omnitrain.__getattr__("EMA")
            assert gc.isenabled() is is_enabled
        finally:
            gc.enable()


def test_missing_extra_reports_install() -> None:
    for name, line in zip(("HFTrainer", "HFTrainingArguments"), imported()[3:], strict=True):
        assert line.startswith(f"MissingExtraError {name} needs transformers, which is not installed.")
        assert "`pip install transformers`, or `pip install -e '.[hf]'` in a clone" in line


def test_root_holds_no_rooms_of_its_own() -> None:
    """Every other file is in a room whose name the field knows."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "argument_aliases", "arguments"}


# Public names


def test_public_names_can_be_imported() -> None:
    assert len(omnitrain.__all__) == len(set(omnitrain.__all__))  # ruff keeps them sorted
    assert set(omnitrain.__all__) == set(omnitrain._MODULES) <= set(dir(omnitrain))
    for name in omnitrain.__all__:
        assert getattr(omnitrain, name) is not None, name
    for name, value in vars(omnitrain).items():
        is_ours = getattr(value, "__module__", "").split(".")[0] == "omnitrain"
        assert name in omnitrain.__all__ or name.startswith("_") or not is_ours, name
    with pytest.raises(AttributeError, match="Trainr"):
        omnitrain.Trainr  # noqa: B018
    assert importlib.import_module("omnitrain.errors").ConfigError is omnitrain.ConfigError


# Objects and names


@functools.cache
def definitions_in(module: str) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree_of(module)) if isinstance(node, kinds)]


def classes_of_the_package() -> Iterator[type]:
    for module in MODULES:
        for _, kind in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            if kind.__module__ == module:
                yield kind


def own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] == "omnitrain"]


def test_class_trees_are_shallow() -> None:
    deep = {kind.__name__: len(own_bases(kind)) for kind in classes_of_the_package()}
    assert not {name: levels for name, levels in deep.items() if levels > MAX_LEVELS}


def backend_branches_in(module: str) -> Iterator[int]:
    """Yield the lines on which code outside of the backends asks which one it has."""
    names = {"Backend", "DDP", "FSDP", "Zero", "FSDPModule", "DistributedDataParallel", "DTensor"}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute) and node.attr in ("sharding", "distributed_type"):
            yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            yield from [node.lineno] if names & set(re.findall(r"\w+", ast.unparse(node.args[1]))) else []


def test_branches_on_backend_are_few() -> None:
    outside = [module for module in MODULES if not module.startswith("omnitrain.backends")]
    asked = [f"{module}:{line}" for module in outside for line in backend_branches_in(module)]
    assert len(asked) <= MAX_BRANCHES_ON_A_BACKEND, asked


@functools.cache
def attributes_written_by(kind: type) -> set[str]:
    """Return the attributes of `self` that the methods of one class body assign."""
    bodies = [node for node in definitions_in(kind.__module__) if node.name == kind.__name__]
    targets = [target for body in bodies for target in ast.walk(body) if isinstance(target, ast.Attribute)]
    targets = [target for target in targets if isinstance(target.ctx, ast.Store)]
    return {target.attr for target in targets if ast.unparse(target.value) == "self"}


def test_attributes_are_written_by_one_class() -> None:
    shared = set()
    for kind in classes_of_the_package():
        written = [attributes_written_by(base) for base in own_bases(kind)]
        twice = {name for names in written for name in names if sum(name in other for other in written) > 1}
        shared |= {f"{kind.__name__}.{name}" for name in twice}
    assert len(shared) <= MAX_SHARED_ATTRIBUTES, sorted(shared)


def test_variables_are_nouns_for_what_they_hold() -> None:
    """Of a thousand names that are assigned at most two are pronouns, adverbs or participles."""
    names = [
        node.id if isinstance(node, ast.Name) else node.arg
        for folder in ("omnitrain", "examples", "benchmarks", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    without_content = [name for name in names if name in WITHOUT_CONTENT]
    assert len(without_content) <= MAX_SHARE_WITHOUT_CONTENT * len(names), without_content


def test_classes_have_names_of_their_own() -> None:
    nodes = [node for module in MODULES for node in definitions_in(module) if isinstance(node, ast.ClassDef)]
    counts = collections.Counter(node.name for node in nodes)
    assert not [name for name, count in counts.items() if count > 1]


def test_modules_begin_with_short_noun_phrases() -> None:
    heads = {module: (ast.get_docstring(tree_of(module)) or "").partition("\n")[0] for module in MODULES}
    clause = re.compile(r"(what|how|where|whether|when|which|who)\b", re.I)
    long = [module for module, head in heads.items() if clause.match(head) or len(head.split()) > MAX_HEAD_WORDS]
    assert not long


def test_names_have_no_empty_words() -> None:
    empty_words = {"manager", "handler", "helper", "helpers", "util", "utils"}
    names = {*".".join(MODULES).split("."), *(node.name for module in MODULES for node in definitions_in(module))}
    words = {name: set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())) for name in names}
    assert not [name for name in names if words[name] & empty_words]


# Walks


@contextlib.contextmanager
def walk() -> Iterator[dict[CodeType, None]]:
    """Collect the functions of the package that are entered inside; comprehensions count as functions."""
    functions: dict[CodeType, None] = {}

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            functions[frame.f_code] = None

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield functions
    finally:
        sys.setprofile(before)


class StepWalk(omnitrain.Callback):
    """Collects the functions that the fourth step of a run enters; runs after all other callbacks."""

    order = 1000

    def __init__(self) -> None:
        self.functions: dict[CodeType, None] = {}
        self._walks = contextlib.ExitStack()

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            self.functions = self._walks.enter_context(walk())
        else:
            self._walks.close()


@pytest.mark.parametrize("name", MAX_WALKS)
def test_steps_evaluations_and_checkpoints_enter_few_functions(name: str, tmp_path: Path) -> None:
    """A cap on lines makes people cut one subject in two; this one has them write less, or do it before the step."""
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    step, model = StepWalk(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    make = functools.partial(
        getattr(omnitrain, name), model, data, data, batch_size=8, loss_fn=nn.functional.cross_entropy,
        save_dir=tmp_path, progress_bar=False, **({"device": "cpu"} if name == "Trainer" else {}),
    )  # fmt: skip
    trainer, longer = make(epochs=1, callbacks=[step]), make(max_steps=9)
    trainer.train()
    walks, calls = {"step": step.functions}, {"evaluate": trainer.evaluate, "save": trainer.save_checkpoint}
    calls |= {"load": lambda: trainer.load_checkpoint("last"), "resume": lambda: longer.train("last")}
    for kind, call in calls.items():
        if kind in MAX_WALKS[name]:
            with walk() as walks[kind]:
                call()
    for kind, (most_functions, most_files) in MAX_WALKS[name].items():
        functions = walks[kind]
        files = {code.co_filename for code in functions}
        walked = [f"{code.co_filename.removeprefix(f'{PACKAGE}/')}: {code.co_qualname}" for code in functions]
        assert 0 < len(functions) <= most_functions and len(files) <= most_files, "\n".join([kind, *walked])


# Docstrings


DOCUMENTED = FunctionType | property | classmethod | staticmethod | functools.cached_property


def test_public_members_have_docstrings() -> None:
    """Those of modules, classes and functions are for ruff, which does not see that an override inherits one."""
    public = [
        (kind, name)
        for kind in classes_of_the_package()
        for name, member in vars(kind).items()
        if isinstance(member, DOCUMENTED) and not kind.__name__.startswith("_") and not name.startswith("_")
    ]
    assert public and not [(kind, name) for kind, name in public if not inspect.getdoc(getattr(kind, name))]


# Arguments


RESULTS = {
    "CheckFinding", "CheckResult", "Event", "Histogram", "MetricsDict", "Predictions", "Progress", "RunComparison",
    "Replay", "RunPlan", "SchedulePreview", "SearchResult", "SearchTrial",
}  # fmt: skip
"""What a user gets and does not make."""
PROTOCOLS = {"EvalUnit", "TrainUnit"}
BY_VARIABLES = {"Config(tree)", "CsvLogger(filename)"}
"""What tests pass as one of several values."""


def parameters_of(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return [name for name in names if name not in ("self", "unknown") and not name.startswith("_")]


def public_arguments() -> dict[str, list[str]]:
    """Return the arguments of all that is public, and of the methods of a trainer; shared ones are BaseTrainer's."""
    shared = parameters_of(omnitrain.BaseTrainer.__init__)
    arguments = {"BaseTrainer": shared}
    for name, method in vars(omnitrain.BaseTrainer).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments[name] = parameters_of(method)
    for name in omnitrain.__all__:
        value = getattr(omnitrain, name)
        if not inspect.isclass(value):
            arguments[name] = parameters_of(value)
        elif "__init__" in vars(value) and name not in RESULTS | PROTOCOLS and not issubclass(value, Exception):
            is_shared = {*shared} if issubclass(value, omnitrain.BaseTrainer) else set()
            arguments.setdefault(name, [name for name in parameters_of(value.__init__) if name not in is_shared])
    return arguments


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command and of those below it, each by its longest name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options_of(below)
        elif action.option_strings and not {"-h", "--version"} & {*action.option_strings}:
            yield max(action.option_strings, key=len)


def test_arguments_and_options_are_passed_by_tests() -> None:
    """By keyword or by position to what takes it, or as a key of a dict in a file that names what takes it."""
    keywords, positions = collections.defaultdict[str, set[str]](set), collections.Counter[str]()
    keys, texts = collections.defaultdict[str, set[str]](set), set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names, passed = set[str](), set[str]()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func).rpartition(".")[2]
                keywords[function] |= {str(keyword.arg) for keyword in node.keywords}
                positions[function] = max(positions[function], len(node.args))
                passed |= {str(keyword.arg) for keyword in node.keywords}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts |= {*node.value.replace("=", " ").split()}
                passed.add(node.value)
            elif isinstance(node, ast.Name | ast.Attribute):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
        for name in names | passed:
            keys[name.rpartition(".")[2]] |= passed
    keys["BaseTrainer"] = set().union(*keys.values())
    missing = [
        f"{owner}({name})"
        for owner, arguments in public_arguments().items()
        for number, name in enumerate(arguments)
        if number >= positions[owner] and name not in keywords[owner] | keys[owner]
    ]
    missing += [option for option in options_of(main._parser()[0]) if option not in texts]
    assert set(missing) == BY_VARIABLES


# The project


def project() -> dict[str, list[str]]:
    """Return the project's requirements: those of the package under the empty name, then those of each extra."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": metadata["dependencies"], **metadata["optional-dependencies"]}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_match_metadata() -> None:
    needed = {normalized(re.split(r"[\[<>=]", line)[0]) for lines in project().values() for line in lines}
    assert needed - {"omnitrain"} <= {normalized(name) for name in pins("constraints.txt")}
    oldest = pins("constraints-oldest.txt")
    for extra in ["", "hf", "deepspeed", "metrics", "torchmetrics", "plot", "tensorboard", "wandb", "search"]:
        floors = dict(line.split(">=") for line in project()[extra])
        assert floors == {name: oldest.get(name) for name in floors}, extra


@functools.cache
def lines_of_the_project() -> dict[str, str]:
    """Return the lines of all text files, by file and number."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in listed if not name.endswith((".png", ".npz", ".safetensors"))]
    return {
        f"{path.relative_to(ROOT)}:{number}": line
        for path in paths
        if path.is_file() and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    }


def test_docs_do_not_install_from_index() -> None:
    pattern = re.compile(r"(pip|uv|uv pip|poetry|conda|pipx) (install|add)[^`\n;&|]*\bomnitrain\b(?!/|\.git)")
    assert pattern.search("run `pip install -U 'omnitrain[hf]'`")
    assert not pattern.search("pip install -e '.[hf]'` in a clone of omnitrain")
    assert not {place: line for place, line in lines_of_the_project().items() if pattern.search(line)}


def test_files_contain_no_local_paths() -> None:
    folders = "|".join(["home", "Users", "root", "work", "farm", "opt", "mnt", "srv", "tmp"])
    pattern = re.compile(
        rf"(?<![\w.~/-])/({folders})/\w|file:/" + r"/|--(extra-)?index-url(?! https://download.pytorch.org/)"
    )
    assert not {place: line for place, line in lines_of_the_project().items() if pattern.search(line)}
