"""Weights at the start of a run: all ranks have one model, wherever its weights were read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, tensors_of
from forking import Found, current_rank
from marks import thinned
from recipes import rows, t16
from safetensors.torch import save_file
from tiny import Tokens, gpt, llama, t5
from torch import nn

from omnitrain.backends.start import initialize_missing

BACKENDS = ("ddp", "fsdp", "zero2", "zero3", "hf2", "hf_fsdp", "hf_zero3")
LANGUAGE_MODELS: dict[str, Any] = {"llama": llama, "gpt": gpt, "t5": t5}


class Scale(nn.Module):
    """A factor that no file has, and that the module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((1,), 0.5), persistent=False)

    def reset_parameters(self) -> None:
        self.factor.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Net(nn.Module):
    """4 -> 16 -> 1 -> 5 -> 1: tied, frozen and 16-bit weights, buffers, and shapes that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.body = t16(dtype=torch.float32)
        self.twins = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        self.twins[1].weight = self.twins[0].weight
        self.wide = nn.Linear(1, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.coarse = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.wide(self.twins(self.body(x))))
        return self.scale(F.linear(self.frozen(x), self.coarse.weight.float()))


class Bare(nn.Module):
    """Weights that nothing makes but the constructor, and if it is derived, a buffer that no file has either."""

    def __init__(self, is_derived: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4))
        if is_derived:
            self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Masked(nn.Module):
    """A layer with a mask and a factor that others have, too."""

    def __init__(self, mask: torch.Tensor, scale: Scale) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(self.linear(x * self.mask))


class Counted(nn.Module):
    """A buffer that is computed, next to a weight that nothing sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.count = torch.arange(3)


def build(kind: str, seed: int = 0) -> nn.Module:
    """Return a model by name, in fp32; a shared one has buffers with several names, of which one is in files."""
    torch.manual_seed(seed)
    if kind in LANGUAGE_MODELS:
        return LANGUAGE_MODELS[kind](seed).float()
    if kind == "shared":
        mask, scale = torch.tensor([1.0, 2.0, 3.0, 0.0]), Scale()
        return nn.Sequential(Masked(mask, scale), Masked(mask, scale), nn.Linear(4, 1))
    return Net() if kind == "net" else Bare(kind == "derived")


def flat(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: tensor.float().flatten().tolist() for name, tensor in tensors}


def contents(trainer: Any) -> dict[str, Any]:
    """Return the tensors of a model, as JSON types; the buffers are those of this rank."""
    buffers = flat(trainer.get_model().named_buffers(remove_duplicate=False))
    return flat(tensors_of(trainer).items()) | {f"buffer {name}": values for name, values in buffers.items()}


def start(backend: str, empty: list[int], kind: str = "net", action: str = "train", **options: Any) -> dict[str, Any]:
    """Return what a model contains at the start, where it is on the meta device on some ranks, and after a step."""
    rank = current_rank()
    with torch.device("meta" if rank in empty else "cpu"):
        model = build(kind, seed=rank)
    data: Any = Tokens(8) if kind in LANGUAGE_MODELS else rows(8, torch.float32)
    defaults: dict[str, Any] = {} if kind in LANGUAGE_MODELS else {"loss_fn": F.mse_loss}
    defaults |= {"batch_size": 4, "max_steps": 1, "learning_rate": 0.01}
    torch.manual_seed(5)
    trainer = make_trainer(backend, model, data, **{**defaults, **options})
    if action == "evaluate":
        trainer.evaluate(data)
    first = contents(trainer)
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    trainer.train(resume_from="last" if action == "resume" else None)
    return {"first": first, "trainable": names, "trained": contents(trainer)}


NEEDED = {
    "start_is": ("real", "main", "several"), "shared": ("shared real", "shared empty"),
    "other": ("other real", "other main", "other empty"), "missing_weights_are_drawn": ("drawn",),
    "checkpoint": ("saves", "resumes", "from it"),
}  # fmt: skip
"""The jobs of a test on a backend, by the beginning of its name."""
SHARDED = ("fsdp", "zero3")
KINDS = [("fsdp", "llama"), ("zero3", "t5"), ("fsdp", "gpt"), ("zero3", "llama")]
"""Models of transformers; FSDP 2 of accelerate cannot shard T5's, whose embedding is shared by its halves."""
BARE = ("1 tensors of the main rank's model are on the meta device", "weight (Bare)", "init_from", "reset_parameters")
WITHOUT_VALUES = [
    ("ddp", "nowhere", BARE), ("fsdp", "evaluated", BARE),
    ("fsdp", "derived", ("nothing computes 1 of its buffers", "table (Bare)")), ("zero3", "nowhere", BARE),
]  # fmt: skip
"""Backend, job, and what its error says of tensors that nothing gives values."""


def jobs_of(backend: str, folder: Path, *names: str) -> list[Job]:
    other, path = {"init_from": str(folder / "other.safetensors")}, folder / f"saves-{backend}"
    shared, bare = {"kind": "shared", "max_steps": 2}, {"kind": "bare"}
    saves: dict[str, Any] = {**bare, "save_dir": str(path), "save_steps": 1, "max_steps": 2}
    options: dict[str, dict[str, Any]] = {
        "several": {"init_from": str(folder / "several")}, "other real": other, "other empty": other,
        "other main": other, "shared real": shared,
        "shared empty": {**shared, "init_from": str(folder / "shared.safetensors")}, "nowhere": bare,
        "derived": {"kind": "derived"}, "evaluated": {**bare, "action": "evaluate"}, "saves": saves,
        "resumes": {**saves, "action": "resume"}, "from it": {**bare, "init_from": str(path / "checkpoint-2")},
    }  # fmt: skip
    for kind in LANGUAGE_MODELS:
        model = {"kind": kind, "init_from": str(folder / kind), "autocast": "bf16" if kind == "llama" else None}
        options |= {f"{kind} real": model, f"{kind} empty": model, f"{kind} drawn": {"kind": kind}}
    empty = {
        name: [] if name.endswith(("real", "saves")) else [1] if name.endswith("main") else [0, 1] for name in names
    }
    return [
        Job(f"{backend} {name}", backend, "test_start:start", {"empty": empty[name], **options.get(name, {})})
        for name in names
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    weights = {name: tensor.clone() for name, tensor in build("net").state_dict().items()}
    del weights["twins.1.weight"]
    rest = {name: tensor for name, tensor in weights.items() if name != "body.0.weight"}
    doubles = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in rest.items()}
    save_file(doubles, folder / "other.safetensors")
    (folder / "several").mkdir()
    for number, part in enumerate((list(weights)[::2], list(weights)[1::2])):
        save_file({name: weights[name] for name in part}, folder / "several" / f"{number}.safetensors")
    index = {name: f"{number % 2}.safetensors" for number, name in enumerate(weights)}
    (folder / "several" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    buffers = {name: buffer.clone() for name, buffer in build("shared").state_dict().items()}
    save_file(buffers, folder / "shared.safetensors")
    for kind in LANGUAGE_MODELS:
        build(kind).save_pretrained(folder / kind)  # type: ignore[operator]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Found[list[dict[str, Any]]]:
    def asked(test: str, *names: str) -> list[Any]:
        return sorted(asked_for(request, *names, test=f"test_{test}"))

    jobs: list[Job] = []
    for test, names in NEEDED.items():
        for backend in asked(test, "backend"):
            jobs += jobs_of(backend, folder, *names)
    for backend, kind in asked("transformers", "backend", "kind"):
        jobs += jobs_of(backend, folder, *(f"{kind} {name}" for name in ("real", "empty", "drawn")))
    for backend, job, _ in asked("tensors_without", "backend", "job", "fragments"):
        jobs += jobs_of(backend, folder, job)
    return launch_all({job.name: job for job in jobs}.values(), folder / "jobs")


def results_of(results: Found[list[dict[str, Any]]], backend: str, *names: str) -> list[list[dict[str, Any]]]:
    selected = [results[f"{backend} {name}"] for name in names]
    for result in (rank for ranks in selected for rank in ranks):
        assert "error" not in result, result["error"] + result["message"]
    return selected


def test_initialize_missing_draws_only_what_is_missing() -> None:
    with torch.device("meta"):
        first, second, counted = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), Counted()
    first.bias, second.weight = nn.Parameter(torch.full((4,), 7.0)), first.weight
    names = {"0.weight", "2.weight", "2.count"}
    torch.manual_seed(3)
    assert initialize_missing(nn.Sequential(first, second, counted), names) == {"2.weight": "Counted"}
    torch.manual_seed(3)
    assert first.weight is second.weight and torch.equal(first.weight, nn.Linear(4, 4).weight)
    assert first.bias.tolist() == [7.0] * 4 and not hasattr(first.bias, "_is_hf_initialized")
    assert counted.count.tolist() == [0, 1, 2]


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["fsdp", "zero3", "hf2"]))
def test_start_is_independent_of_where_weights_are(backend: str, results: Found[list[dict[str, Any]]]) -> None:
    real, *copies = results_of(results, backend, "real", "main", "several")
    expected, first = flat(build("net").state_dict().items()), real[0]["first"]
    assert all(first[name] == expected[name] for name in expected if name in first) and "body.0.weight" in first
    assert first["buffer scale.factor"] == [0.5] and first == real[1]["first"]
    assert real[0]["trained"] != first and "wide.weight" in real[0]["trainable"]
    assert "coarse.weight" not in real[0]["trainable"]
    assert copies == [real, real]


@pytest.mark.parametrize("backend", thinned(["ddp", *SHARDED], ["fsdp"]))
def test_shared_buffer_stays_one_with_its_values(backend: str, results: Found[list[dict[str, Any]]]) -> None:
    expected = start("native", [], "shared", batch_size=8, max_steps=2)
    for ranks in results_of(results, backend, "shared real", "shared empty"):
        assert ranks[0] == ranks[1] and ranks[0]["first"] == ranks[1]["first"]
        for moment in ("first", "trained"):
            assert ranks[0][moment].keys() == expected[moment].keys()
            for name, values in ranks[0][moment].items():
                assert values == pytest.approx(expected[moment][name.replace("1.mask", "0.mask")]), name
            assert ranks[0][moment]["buffer 1.mask"] == [1.0, 2.0, 3.0, 0.0]
            assert ranks[0][moment]["buffer 1.scale.factor"] == [0.5]


@pytest.mark.parametrize("backend", thinned(SHARDED, ["fsdp"]))
def test_other_dtypes_are_cast_as_on_one_process(backend: str, results: Found[list[dict[str, Any]]]) -> None:
    real, main, empty = results_of(results, backend, "other real", "other main", "other empty")
    assert main == real and empty[0]["first"] == empty[1]["first"]
    for name, values in real[0]["first"].items():
        assert name == "body.0.weight" or empty[0]["first"][name] == values, name
    drawn = torch.tensor(empty[0]["first"]["body.0.weight"])  # is not in the file: the module draws it
    assert 0.1 < drawn.abs().max() <= 0.5


@pytest.mark.parametrize("backend", thinned(SHARDED, ["fsdp"]))
def test_missing_weights_are_drawn_on_the_main_rank(backend: str, results: Found[list[dict[str, Any]]]) -> None:
    (ranks,), expected = results_of(results, backend, "drawn"), Net()
    first = ranks[0]["first"]
    assert first == ranks[1]["first"] and first["buffer scale.factor"] == [0.5]
    assert first["norm.weight"] == [1.0] * 5 and first["norm.running_mean"] == [0.0] * 5
    torch.manual_seed(5)
    for module in expected.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    drawn = flat(expected.state_dict().items())
    assert first["body.0.weight"] == drawn["body.0.weight"] and first["frozen.bias"] == drawn["frozen.bias"]


@pytest.mark.parametrize(("backend", "kind"), thinned(KINDS, KINDS[:1]))
def test_transformers_models_start_without_memory(backend: str, kind: str, results: Any) -> None:
    real, empty, drawn = results_of(results, backend, *(f"{kind} {name}" for name in ("real", "empty", "drawn")))
    assert empty == real and real[0]["first"] != real[0]["trained"]
    first = drawn[0]["first"]
    for name, values in real[0]["first"].items():
        if name.startswith("buffer"):
            assert first[name] == values, name
        expected, actual = torch.tensor(values), torch.tensor(first[name])
        if expected.numel() > 100:  # the spread that transformers draws
            assert 0.7 < actual.std() / expected.std() < 1.4 or expected.std() == 0 == actual.std(), name


@pytest.mark.parametrize(("backend", "job", "fragments"), thinned(WITHOUT_VALUES, WITHOUT_VALUES[:3]))
def test_tensors_without_values_are_an_error(backend: str, job: str, fragments: Any, results: Any) -> None:
    for result in results[f"{backend} {job}"]:
        assert result["error"] == "ConfigError" and all(fragment in result["message"] for fragment in fragments)


@pytest.mark.parametrize("backend", thinned(SHARDED, ["fsdp"]))
def test_checkpoint_fills_a_model_without_weights(backend: str, results: Found[list[dict[str, Any]]]) -> None:
    saved, resumed, started = results_of(results, backend, "saves", "resumes", "from it")
    assert [rank["trained"] for rank in resumed] == [rank["trained"] for rank in saved]
    assert [rank["first"] for rank in started] == [rank["trained"] for rank in saved]
