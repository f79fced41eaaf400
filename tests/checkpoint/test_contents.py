"""Whatever is in a checkpoint, it is put back whole, or refused with the trainer as it was."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import ODDITIES, SPOILINGS, content_of, copied, forge_tensors, places, put, seal, spoil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipes import rows, t16
from tiny import Tokens, gpt

from omnitrain import AccelerateTrainer, Callback, CheckpointError, HFTrainer, NonFiniteError, Trainer
from omnitrain.checkpoint.contents import OPTIMIZER, RNG, STATES
from omnitrain.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST, read_manifest
from omnitrain.checkpoint.state import WEIGHTS, load_tensors, save_tensors

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
STEPS = 4


class Keeper(Callback):
    """Keeps tensors, lists and numbers, and notes what it is told."""

    def __init__(self) -> None:
        self.kept: Any = {"mean": torch.zeros(3), "pair": (torch.zeros(()), [1])}
        self.told: list[str] = []

    def on_step_end(self, trainer: Any) -> None:
        self.kept["mean"] = self.kept["mean"] + 1
        self.kept["pair"] = (self.kept["pair"][0] + 0.5, [trainer.progress.step])

    def on_checkpoint_loaded(self, trainer: Any) -> None:
        self.told.append(f"loaded {trainer.progress.step} {float(self.kept['mean'][0])}")

    def on_train_start(self, trainer: Any) -> None:
        self.told.append("start")

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["mean"], torch.Tensor) and state["mean"].shape == (3,)
        number, steps = state["pair"]
        assert isinstance(number, torch.Tensor) and isinstance(steps, list)
        self.kept = state


def make(kind: str, save_dir: Path, **options: Any) -> Any:
    device = {"device": "cpu"} if kind == "native" else {}
    defaults: dict[str, Any] = {
        "batch_size": 4, "eval_steps": 2, "learning_rate": 0.01, "log_steps": 1, "loss_fn": F.mse_loss,
        "lr_scheduler": "cosine",
        "max_steps": STEPS, "progress_bar": False, "save_steps": 2, "load_best_at_end": False,
    }  # fmt: skip
    defaults |= {"callbacks": [Keeper()], "eval_dataset": rows(4), "save_dir": save_dir, **device, **options}
    return TRAINERS[kind](t16(dropout=0.1), train_dataset=rows(12), **defaults)


@pytest.fixture(scope="module", params=TRAINERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder in memory, where there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def saved(kind: str, folder: Path) -> Path:
    """A run with two checkpoints, of steps 2 and 4."""
    run = folder / kind
    if not run.exists():
        make(kind, run).train()
    return run


def newest(run: Path) -> Path:
    return max(path for path in run.glob("checkpoint-*") if path.is_dir())


def facts(trainer: Any) -> Any:
    """All of a trainer that a checkpoint could change."""
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    moments = [dict(entry) for entry in trainer.optimizer.state.values()]
    options = [
        {key: copy.copy(value) for key, value in one.items() if key != "params"}
        for one in trainer.optimizer.param_groups
    ]
    schedule = None if trainer.lr_scheduler is None else copy.deepcopy(trainer.lr_scheduler.state_dict())
    keeper = next(one for one in trainer.lifecycle.callbacks if isinstance(one, Keeper))
    return (
        weights,
        moments,
        options,
        schedule,
        trainer.progress.state_dict(),
        trainer.objective.state_dict(),
        keeper.kept,
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def grow(name: str) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(64, dtype=tensors[name].dtype)})


def shrink(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].flatten()[:1].clone()})


def narrow(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].to(torch.complex64)})


FORGED: list[tuple[str, Any]] = [
    (OPTIMIZER, shrink("0.weight/exp_avg")),
    (OPTIMIZER, grow("3.bias/exp_avg_sq")),
    (OPTIMIZER, narrow("0.bias/exp_avg")),
    (OPTIMIZER, grow("0.weight/step")),
    (OPTIMIZER, lambda tensors: tensors.pop("0.weight/exp_avg_sq")),
    (OPTIMIZER, lambda tensors: tensors["0.weight/step"].fill_(float("nan"))),
    (OPTIMIZER, lambda tensors: tensors["3.bias/step"].neg_()),
    (OPTIMIZER, lambda tensors: tensors.update({"9.weight/exp_avg": torch.zeros(1)})),
    (RNG, shrink("0/torch")),
    (RNG, lambda tensors: tensors["0/python"].neg_()),
    (RNG, lambda tensors: tensors.update({"0/numpy": tensors["0/numpy"].float()})),
    (RNG, lambda tensors: tensors.pop("0/torch")),
    (STATES, lambda tensors: tensors.clear()),
]


@pytest.mark.parametrize("case", range(len(FORGED)))
def test_tensors_that_no_such_run_holds_are_refused_with_nothing_changed_and_auto_takes_the_one_before(
    kind: str, case: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = copied(saved(kind, folder), folder / "forged")
    forge_tensors(newest(run), *FORGED[case])
    trainer = make(kind, run)
    before = facts(trainer)
    with pytest.raises(CheckpointError):
        trainer.train(resume_from=newest(run))
    with pytest.raises(CheckpointError):
        trainer.load_checkpoint(newest(run))
    assert same(facts(trainer), before)
    trainer.train(resume_from="auto")
    assert trainer.progress.step == STEPS
    assert any("Passed over" in message and newest(run).name in message for message in caplog.messages)


def test_weights_of_another_shape_or_dtype_are_refused_with_nothing_changed(kind: str, folder: Path) -> None:
    for change in (shrink("0.weight"), grow("3.bias"), narrow("0.bias"), lambda tensors: tensors.pop("0.bias")):
        run = copied(saved(kind, folder), folder / "forged")
        forge_tensors(newest(run), WEIGHTS, change)
        trainer = make(kind, run)
        before = facts(trainer)
        for which in (newest(run), "last", "auto"):
            with pytest.raises(CheckpointError, match="does not fit the model"):
                trainer.train(resume_from=which)
        assert same(facts(trainer), before)


def test_callback_that_refuses_its_state_is_named_and_nothing_has_changed(kind: str, folder: Path) -> None:
    run = copied(saved(kind, folder), folder / "forged")
    content = content_of(newest(run))
    content["callbacks"][-1]["state"]["mean"] = 3
    seal(newest(run), content)
    trainer = make(kind, run)
    before = facts(trainer)
    with pytest.raises(
        CheckpointError, match=r"Keeper.load_state_dict refused what the checkpoint holds: AssertionError"
    ):
        trainer.train(resume_from="last")
    assert same(facts(trainer), before)


# --- callbacks


def test_tensors_of_a_callback_come_back_and_it_is_told_when_all_is_there(kind: str, folder: Path) -> None:
    run = saved(kind, folder)
    keeper = Keeper()
    trainer = make(kind, folder / "further", max_steps=6, callbacks=[keeper])
    trainer.train(resume_from=newest(run), allow_change={"lr_scheduler_options"})
    assert keeper.told == [f"loaded {STEPS} {float(STEPS)}", "start"]
    assert keeper.kept["mean"].tolist() == [6.0] * 3 and float(keeper.kept["pair"][0]) == 3.0
    assert keeper.kept["pair"][1] == [6]
    keeper.told.clear()
    trainer.load_checkpoint(newest(run))
    assert keeper.told == [f"loaded {STEPS} {float(STEPS)}"] and keeper.kept["mean"].tolist() == [4.0] * 3


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x"])
def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    kind: str, value: Any, tmp_path: Path
) -> None:
    keeper = Keeper()
    keeper.kept["odd"] = [value]
    trainer = make(kind, tmp_path / "run", callbacks=[keeper])
    with pytest.raises(CheckpointError, match=rf"Keeper/odd/0` holds a {type(value).__name__}"):
        trainer.train()
    assert trainer.progress.step == 0


# --- anything at all


class Hangs(BaseException):
    """It took longer than any resume could."""


def attempt(run: Path, which: Any, seconds: int = 30) -> str:
    """Resume, and say how it ended; an error that is not ours is raised."""

    def hang(*_: Any) -> None:
        raise Hangs

    former = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        place = run if which == "auto" else run.with_name("resumed")
        trainer = make("native", place, max_steps=STEPS + 1, overwrite=True, save_steps=50)
        trainer.train(resume_from=which, allow_change={"lr_scheduler_options"})
    except CheckpointError as error:
        message = str(error)
        assert message.isprintable() or "\n" in message, message
        assert "\x1b" not in message
        return "refused"
    except NonFiniteError:
        return "resumed"  # with a number that is none of that run's, such as 1e308, which a new seal makes its own
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    return "resumed"


def paths_of(folder: Path) -> list[tuple[Any, ...]]:
    return [path for path in places(content_of(folder)) if path[0] not in ("format_version", "sha256")]


def try_manifest(run: Path, target: Path, index: int, kind: str, oddity: Any, which: Any = None) -> str:
    copied(run, target)
    folder = newest(target)
    content = content_of(folder)
    paths = paths_of(folder)
    put(content, paths[index % len(paths)], copy.deepcopy(oddity), delete=kind == "delete")
    try:
        seal(folder, content)
    except UnicodeEncodeError:
        return "refused"  # no JSON
    return attempt(target, which or folder)


def try_damage(run: Path, target: Path, file: int, how: str, position: int, fill: int, which: Any = None) -> str:
    copied(run, target)
    folder = newest(target)
    names = [MANIFEST, *content_of(folder)["files"]]
    spoil(folder / names[file % len(names)], how, position, fill)
    return attempt(target, which or folder)


CHANGES: dict[str, Any] = {
    "index": st.integers(0, 2000),
    "kind": st.sampled_from(["delete", "replace", "replace"]),
    "oddity": st.sampled_from(ODDITIES),
}
DAMAGE: dict[str, Any] = {
    "file": st.integers(0, 4),
    "how": st.sampled_from(SPOILINGS),
    "position": st.integers(0, 1 << 20),
    "fill": st.integers(0, 255),
}


def fuzz(examples: int) -> Any:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@fuzz(40)
@given(**CHANGES)
def test_any_change_of_a_manifest_is_refused_or_resumed_from(folder: Path, **change: Any) -> None:
    assert try_manifest(saved("native", folder), folder / "changed", **change) in ("refused", "resumed")


@fuzz(15)
@given(**CHANGES)
def test_auto_resumes_whatever_a_manifest_was_changed_to(folder: Path, **change: Any) -> None:
    # but where settings were changed: these are refused, or an older run would be gone on with
    assert try_manifest(saved("native", folder), folder / "changed", **change, which="auto") in ("refused", "resumed")


@fuzz(25)
@given(**DAMAGE)
def test_any_damage_to_any_file_is_refused(folder: Path, **damage: Any) -> None:
    assert try_damage(saved("native", folder), folder / "damaged", **damage) == "refused"


@fuzz(15)
@given(**DAMAGE)
def test_auto_resumes_from_the_one_before_after_any_damage(folder: Path, **damage: Any) -> None:
    assert try_damage(saved("native", folder), folder / "damaged", **damage, which="auto") == "resumed"


@pytest.mark.slow
@fuzz(4000)
@given(**CHANGES, which=st.sampled_from([None, "auto"]))
def test_any_change_of_a_manifest_is_refused_or_resumed_from_at_length(folder: Path, **change: Any) -> None:
    assert try_manifest(saved("native", folder), folder / "changed", **change) in ("refused", "resumed")


@pytest.mark.slow
@fuzz(2000)
@given(**DAMAGE, which=st.sampled_from([None, "auto"]))
def test_any_damage_to_any_file_is_refused_or_passed_over_at_length(folder: Path, which: Any, **damage: Any) -> None:
    expected = "resumed" if which else "refused"
    assert try_damage(saved("native", folder), folder / "damaged", **damage, which=which) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "sha256": "%s", "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"format_version": 1, "sha256": "%s", "step": 1, "step": 2}', "a key twice"),
        ('{"format_version": 1, "sha256": "%s", "step": ' + "9" * 5000 + "}", "digits"),
        ('{"format_version": 1, "sha256": "%s", "step": "\\u001b[2J"}', r"step = .*x1b"),
        ("[]", "does not match its own sha256"),
    ],
)
def test_manifest_is_hashed_before_it_is_parsed_and_parsed_within_limits(
    text: str, message: str, tmp_path: Path
) -> None:
    blank = text.replace("%s", "0" * 64)
    (tmp_path / MANIFEST).write_text(blank.replace("0" * 64, hashlib.sha256(blank.encode()).hexdigest(), 1))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(tmp_path)
    assert str(caught.value).isprintable()


def test_manifest_of_more_bytes_than_one_can_have_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, LARGEST_MANIFEST + 1)
    with pytest.raises(CheckpointError, match=f"{LARGEST_MANIFEST + 1} bytes"):
        read_manifest(tmp_path)


def test_random_numbers_in_a_file_by_rank_are_still_read(folder: Path) -> None:
    run = copied(saved("native", folder), folder / "older")
    old = newest(run)
    tensors, content = load_tensors(old / RNG), content_of(old)
    (old / RNG).unlink()
    del content["files"][RNG]
    save_tensors({name.partition("/")[2]: one for name, one in tensors.items()}, old / "rng/rank-00000.safetensors")
    data = (old / "rng/rank-00000.safetensors").read_bytes()
    content["files"]["rng/rank-00000.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(old, content)
    for path in (newest(saved("native", folder)), old):
        trainer = make("native", folder / "elsewhere")
        trainer.load_checkpoint(path)
        assert torch.get_rng_state().equal(tensors["0/torch"])
        torch.manual_seed(0)


def test_pointers_of_a_run_open_as_models_of_transformers_do(tmp_path: Path) -> None:
    model = gpt()
    options: dict[str, Any] = {"progress_bar": False, "device": "cpu", "max_steps": 1, "batch_size": 2}
    Trainer(model, Tokens(4), Tokens(2), save_dir=tmp_path / "run", **options).train()
    for which in ("last", "best"):
        other = type(model).from_pretrained(tmp_path / "run" / which)
        assert same(dict(other.state_dict()), dict(model.state_dict()))
