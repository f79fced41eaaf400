"""The folder that DeepSpeed compiles into: omnitrain's own, with a lock that ends with its process."""

import os
import signal
import sys
import time
from pathlib import Path

import programs
import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from omnitrain.backends.compile_cache import CompileLock, cache_folder, use_compile_cache

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks; torch's stay there")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")  # so that it is restored after the tests, which set it
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton)


def is_locked(folder: Path) -> bool:
    import fcntl

    with open(folder / "omnitrain.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_use_compile_cache_sets_folder_and_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_compile_cache()
    use_compile_cache()  # a second trainer of the same process
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    assert folder == cache_folder() and folder.is_dir() and folder.is_relative_to(tmp_path / "cache")
    monkeypatch.setattr("sys.prefix", "/another/environment")
    assert cache_folder() != folder and cache_folder().parent == folder.parent
    operator, states = folder / "operator", list[bool]()
    operator.mkdir()
    (operator / "lock").touch()  # of torch, which a program without omnitrain may have left
    compiling = {"_write_ninja_file_and_build_library": lambda **_: states.append(is_locked(operator))}
    for name, function in {**compiling, "_import_module_from_library": lambda *_: None}.items():
        monkeypatch.setattr(cpp_extension, name, function)
    cpp_extension.load("operator_of_test", [__file__], build_directory=str(operator))
    assert states == [True] and not is_locked(operator)


@pytest.mark.parametrize("depth", ["op", "py311_cu128/op"])
def test_use_compile_cache_keeps_folder_of_user(
    depth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / depth / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    use_compile_cache()
    assert not caplog.records  # another program compiles
    os.utime(lock, (time.time() - 7200,) * 2)
    use_compile_cache()
    assert [record.getMessage().partition(" is 120 minutes old")[0] for record in caplog.records] == [str(lock)]
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path) and cpp_extension.FileBaton is FileBaton


def test_use_compile_cache_without_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    use_compile_cache()
    assert "TORCH_EXTENSIONS_DIR" not in os.environ and cpp_extension.FileBaton is FileBaton
    assert "DeepSpeed compiles into torch's folder instead" in caplog.text


@pytest.mark.processes
def test_compile_lock_ends_with_its_process(tmp_path: Path) -> None:
    """torch's lock would stay, and every later program wait for it."""

    def die_with_lock() -> None:
        child_lock = CompileLock(str(tmp_path / "lock"))
        if child_lock.try_acquire() and is_locked(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert programs.exit_code(programs.fork(die_with_lock)) == -signal.SIGKILL
    lock = CompileLock(str(tmp_path / "lock"))
    assert not is_locked(tmp_path) and lock.try_acquire() and is_locked(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)
    assert not (tmp_path / "lock").exists()  # a program without omnitrain would wait for it
