"""The laws of CONTRIBUTING.md that a machine can check: floors, circles, imports, public names, objects, docstrings.

Guards of size look at objects as their users meet them, inherited members included; no cap on a file's length makes
anybody cut one subject in two.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import programs
import pytest

import omnitrain

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "omnitrain"

FLOORS = {
    0: "clock errors duration progress descriptors metrics objective events",
    1: "whatever is named on no other floor",
    2: "backends checkpoint callbacks algorithms multitask units",
    3: "run",
    4: "trainers hf sweeps",
    5: "config cli checkpoint_cli demo launch __main__",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() if floor != 1 for name in names.split()}
NO_TORCH = [
    f"omnitrain.{name}"
    for name in (
        *FLOORS[0].split(),
        "settings",
        "run.lifecycle",
        "checkpoint.disk",
        "checkpoint.lock",
        "checkpoint.manifest",
        "checkpoint.retention",
        "checkpoint.store",
    )
]
TORCH_ON_FIRST_USE = ["omnitrain.cli", "omnitrain.checkpoint_cli", "omnitrain.config.nnscaler", "omnitrain.launch"]
HEAVY = {
    "accelerate",
    "deepspeed",
    "matplotlib",
    "optuna",
    "sklearn",
    "tensorboard",
    "transformers",
    "torchmetrics",
    "wandb",
    "yaml",
}
LOADED_ON_FIRST_USE = {"AccelerateTrainer", "HFTrainer", "HFTrainingArguments"}

MAX_FUNCTION_LINES = 60
MAX_MEMBERS = {"BaseTrainer": 60, "Trainer": 60, "AccelerateTrainer": 65, "HFTrainer": 80}
"""The members of a trainer with the inherited ones, but for the calls of transformers.Trainer, which have a file."""
MAX_LEVELS = 4
MAX_BRANCHES_ON_A_BACKEND = 5
MAX_SHARED_ATTRIBUTES = 5


@dataclass(slots=True, frozen=True)
class Import:
    """One name that a module imports."""

    target: str
    """The module meant: `omnitrain.data` for `from omnitrain.data import windows`."""
    runs: bool
    """Whether the import is ever run; False under TYPE_CHECKING."""
    line: int


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


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


def imports_of(module: str) -> list[Import]:
    """Return what the module imports anywhere, inside functions and for type checkers too."""

    def walk(nodes: list[ast.stmt] | list[ast.AST], runs: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target in targets_of(module, node):
                    yield Import(target, runs, node.lineno)
            elif isinstance(node, ast.If) and is_type_checking(node.test):
                yield from walk(node.body, False)
                yield from walk(node.orelse, runs)
            else:
                yield from walk(list(ast.iter_child_nodes(node)), runs)

    return list(walk(tree_of(module).body, True))


def own_imports_of(module: str) -> list[Import]:
    """Return what the module imports from the package; the package itself, which names everything, imports nothing."""
    if module == "omnitrain":
        return []
    found = [found for found in imports_of(module) if found.target.split(".")[0] == "omnitrain"]
    return [one for one in found if one.target != "omnitrain"]


def floor_of(module: str) -> int:
    """Return the floor a module lives on; the package itself, which names everything, is a door."""
    return FLOOR_OF.get(module.split(".")[1], 1) if "." in module else max(FLOORS)


def run_python(code: str) -> str:
    result = programs.run(sys.executable, "-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def loaded_by(statements: str) -> set[str]:
    """Return the top-level packages that are in memory after a fresh Python ran the statements."""
    return set(run_python(f"{statements}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})").split())


every_module = pytest.mark.parametrize("module", MODULES)


# Imports


@every_module
def test_imports_go_down_only(module: str) -> None:
    up = [
        f"{MODULES[module].name}:{found.line} imports {found.target}"
        for found in own_imports_of(module)
        if floor_of(found.target) > floor_of(module)
    ]
    assert not up


def test_imports_have_no_circles() -> None:
    graph = {module: {found.target for found in own_imports_of(module)} - {module} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", [name for name in NO_TORCH if name in MODULES])
def test_no_torch_modules_do_not_name_torch(module: str) -> None:
    assert "torch" not in {found.target.split(".")[0] for found in imports_of(module) if found.runs}


def test_no_torch_modules_do_not_load_torch() -> None:
    present = [name for name in (*NO_TORCH, *TORCH_ON_FIRST_USE) if name in MODULES]
    assert "torch" not in loaded_by(f"import {', '.join(present)}")


def test_import_loads_no_heavy_package() -> None:
    assert not loaded_by("import omnitrain") & {"torch", *HEAVY}


@pytest.mark.parametrize("name", ["HFTrainer", "HFTrainingArguments"])
def test_missing_extra_reports_install(name: str) -> None:
    code = f"""
import sys
sys.modules["transformers"] = None
try:
    from omnitrain import {name}
except ImportError as error:
    print(type(error).__name__, error)
"""
    said = run_python(code)
    assert said.startswith(f"MissingExtraError {name} needs transformers, which is not installed.")
    assert "`pip install transformers`, or `pip install -e '.[hf]'` in a clone" in said


def test_public_names_load_no_optional_package() -> None:
    names = sorted(set(omnitrain.__all__) - LOADED_ON_FIRST_USE)
    assert not loaded_by(f"from omnitrain import {', '.join(names)}") & HEAVY


# Public names


def test_public_names_are_unique() -> None:  # ruff keeps them sorted
    assert len(omnitrain.__all__) == len(set(omnitrain.__all__))
    assert set(omnitrain.__all__) == set(omnitrain._HOMES)


@pytest.mark.parametrize("name", getattr(omnitrain, "__all__", []))
def test_public_names_can_be_imported(name: str) -> None:
    assert getattr(omnitrain, name) is not None
    assert name in dir(omnitrain)


def test_package_hides_private_names() -> None:
    ours = {
        name
        for name, value in vars(omnitrain).items()
        if not name.startswith("_") and getattr(value, "__module__", "").split(".")[0] == "omnitrain"
    }
    assert ours <= set(omnitrain.__all__)


def test_package_rejects_unknown_name() -> None:
    with pytest.raises(AttributeError, match="Trainr"):
        omnitrain.Trainr  # noqa: B018


# Sizes and names


def definitions_in(module: str) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its signature and its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


@every_module
def test_functions_are_short(module: str) -> None:
    functions = [node for node in definitions_in(module) if not isinstance(node, ast.ClassDef)]
    lengths = {f"{module}.{node.name}": body_lines(node) for node in functions}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}


# Objects


def members_of(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("__") and name != "_abc_impl"]


@pytest.mark.parametrize("name", MAX_MEMBERS)
def test_trainers_have_few_members(name: str) -> None:
    calls = (
        vars(importlib.import_module("omnitrain.hf.calls").Calls).keys() - set(dir(omnitrain.BaseTrainer))
        if name == "HFTrainer"
        else set()
    )
    assert len(set(members_of(getattr(omnitrain, name))) - calls) <= MAX_MEMBERS[name]


def classes_of_the_package() -> Iterator[type]:
    for module in MODULES:
        for value in vars(importlib.import_module(module)).values():
            if inspect.isclass(value) and value.__module__ == module:
                yield value


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


def attributes_written_by(kind: type) -> set[str]:
    """Return the attributes of `self` that the methods of one class body assign."""
    found = set()
    for node in ast.walk(tree_of(kind.__module__)):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            stored = [
                one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            ]
            found |= {one.attr for one in stored if ast.unparse(one.value) == "self"}
    return found


def test_attributes_are_written_by_one_class() -> None:
    shared = set()
    for kind in classes_of_the_package():
        written = [attributes_written_by(base) for base in own_bases(kind)]
        twice = {name for names in written for name in names if sum(name in other for other in written) > 1}
        shared |= {f"{kind.__name__}.{name}" for name in twice}
    assert len(shared) <= MAX_SHARED_ATTRIBUTES, sorted(shared)


@every_module
def test_names_have_no_empty_words(module: str) -> None:
    empty_words = {"manager", "handler", "helper", "helpers", "util", "utils"}
    names = [*module.split("."), *(node.name for node in definitions_in(module))]
    vague = [
        name for name in names if empty_words & set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower()))
    ]
    assert not vague


# Docstrings and annotations


def public_members(value: type) -> Iterator[str]:
    for name, member in vars(value).items():
        is_callable = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
        if not name.startswith("_") and (is_callable or isinstance(member, functools.cached_property)):
            yield name


def undocumented_in(module: ModuleType) -> Iterator[str]:
    if not module.__doc__:
        yield module.__name__
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) and not value.__doc__:
            yield f"{module.__name__}.{name}"
        elif inspect.isclass(value):
            if not value.__doc__:
                yield f"{module.__name__}.{name}"
            # `getdoc` finds the docstring that an override inherits.
            for member in public_members(value):
                if not inspect.getdoc(getattr(value, member)):
                    yield f"{module.__name__}.{name}.{member}"


@every_module
def test_public_names_have_docstrings(module: str) -> None:
    assert not list(undocumented_in(importlib.import_module(module)))


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> list[ast.arg]:
    found = [*node.args.posonlyargs, *node.args.args]
    if is_method and not any(ast.unparse(item) == "staticmethod" for item in node.decorator_list):
        found = found[1:]  # self or cls
    return [*found, *node.args.kwonlyargs, *(arg for arg in (node.args.vararg, node.args.kwarg) if arg)]


def statements_of(node: ast.ClassDef | ast.If) -> Iterator[ast.stmt]:
    for item in node.body:
        yield from statements_of(item) if isinstance(item, ast.If) else [item]


@every_module
def test_functions_are_annotated(module: str) -> None:
    classes = [node for node in definitions_in(module) if isinstance(node, ast.ClassDef)]
    methods = {item for node in classes for item in statements_of(node)}
    bare = []
    for node in definitions_in(module):
        if isinstance(node, ast.ClassDef):
            continue
        bare += [f"{node.name}({arg.arg})" for arg in arguments_of(node, node in methods) if arg.annotation is None]
        bare += [f"{node.name} -> ?"] if node.returns is None else []
    assert not bare


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


def test_constraints_pin_every_requirement() -> None:
    needed = {normalized(re.split(r"[\[<>=]", line)[0]) for lines in project().values() for line in lines} - {
        "omnitrain"
    }
    assert needed <= {normalized(name) for name in pins("constraints.txt")}


@pytest.mark.parametrize(
    "extra", ["", "hf", "deepspeed", "metrics", "torchmetrics", "plot", "tensorboard", "wandb", "search"]
)
def test_oldest_constraints_match_metadata(extra: str) -> None:
    floors = dict(line.split(">=") for line in project()[extra])
    oldest = pins("constraints-oldest.txt")
    assert floors == {name: oldest.get(name) for name in floors}


def files_of_the_project() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    found = [ROOT / name for name in listed.stdout.decode().split("\0")]
    return [path for path in found if path.is_file() and path.suffix not in (".png", ".npz", ".safetensors")]


def test_docs_do_not_install_from_index() -> None:
    pattern = re.compile(r"(pip|uv|uv pip|poetry|conda|pipx) (install|add)[^`\n;&|]*\bomnitrain\b(?!/|\.git)")
    assert pattern.search("run `pip install -U 'omnitrain[hf]'`")
    assert not pattern.search("pip install -e '.[hf]'` in a clone of omnitrain")
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files_of_the_project()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path != Path(__file__) and pattern.search(line)
    ]
    assert not lines


def test_files_contain_no_local_paths() -> None:
    places = "|".join(["home", "Users", "root", "work", "farm", "opt", "mnt", "srv", "tmp"])
    pattern = re.compile(
        rf"(?<![\w.~/-])/({places})/\w|file:/" + r"/|--(extra-)?index-url(?! https://download.pytorch.org/)"
    )
    found = []
    for path in files_of_the_project():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found
