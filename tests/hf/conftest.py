"""Training arguments for the tests of HFTrainer."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import TrainingArguments


def maker(module: ModuleType, root: Path) -> Callable[..., Any]:
    """Return a function that makes quiet arguments for a CPU, with the `DEFAULTS` of a test module.

    Args:
        module: It may name another class of arguments as `ARGUMENTS`.
        root: Where the folders of the runs are.
    """

    def make(folder: str = "run", kind: Any = None, **options: Any) -> Any:
        defaults = {
            "output_dir": str(root / folder), "use_cpu": True, "report_to": "none", "save_strategy": "no",
            **getattr(module, "DEFAULTS", {}),
        }  # fmt: skip
        kind = kind or getattr(module, "ARGUMENTS", TrainingArguments)
        return kind(**{**defaults, **options})

    return make


@pytest.fixture
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    return maker(request.module, tmp_path)


@pytest.fixture(scope="module")
def module_arguments(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    return maker(request.module, tmp_path_factory.mktemp("module"))
