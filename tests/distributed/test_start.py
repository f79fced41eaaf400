"""What each rank has before the first step: one model, wherever its weights were read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import make_trainer  # noqa: E402
from compiled import compile_once  # noqa: E402
from forking import Case, Found, Outcome, play  # noqa: E402
from recipes import rows, t16  # noqa: E402
from tiny import Tokens, gpt, llama, t5  # noqa: E402

from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

BACKENDS = ("ddp", "fsdp", "zero2", "zero3", "hf2", "hf_fsdp", "hf_zero3")


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
    """Weights that nothing makes but the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Derived(Bare):
    """With a buffer that no file has, and nothing computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)


class Masked(nn.Module):
    """A layer with a mask and a factor that others have, too."""

    def __init__(self, mask: torch.Tensor, scale: Scale) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(self.linear(x * self.mask))


class Shared(nn.Module):
    """4 -> 4 -> 4 -> 1: buffers with several names, of which one is in files."""

    def __init__(self) -> None:
        super().__init__()
        mask, scale = torch.tensor([1.0, 2.0, 3.0, 0.0]), Scale()
        self.blocks = nn.Sequential(Masked(mask, scale), Masked(mask, scale))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def made(kind: str, seed: int = 0) -> nn.Module:
    """Return a model by name, in fp32."""
    torch.manual_seed(seed)
    others = {"net": Net, "bare": Bare, "derived": Derived, "shared": Shared}
    if kind in others:
        return others[kind]()
    default = torch.get_default_dtype()
    model = {"llama": llama, "gpt": gpt, "t5": t5}[kind](seed)
    assert torch.get_default_dtype() is default
    return model.float()


def state(trainer: Any) -> dict[str, Any]:
    """Return all that a model holds, as JSON types; the buffers are those of this rank."""
    found = {name: whole(one).float() for name, one in sorted(trainer.backend.model_tensors().items())}
    found |= {f"buffer {name}": one.float() for name, one in trainer.get_model().named_buffers(remove_duplicate=False)}
    return {name: one.flatten().tolist() for name, one in found.items()}


def start(backend: str, empty: list[int], kind: str = "net", then: str = "train", **options: Any) -> dict[str, Any]:
    """Return what a model holds at the start, which is on the meta device on some ranks, and after a step."""
    rank = int(os.environ.get("RANK", "0"))
    with torch.device("meta" if rank in empty else "cpu"):
        model = made(kind, seed=rank)
    if kind in ("net", "bare", "derived", "shared"):
        data, options = rows(8, torch.float32), {"loss_fn": F.mse_loss, **options}
    else:
        data = Tokens(8)
    defaults: dict[str, Any] = {"batch_size": 4, "max_steps": 1, "learning_rate": 0.01}
    torch.manual_seed(5)
    trainer = make_trainer(backend, model, data, **{**defaults, **options})
    if then == "evaluate":
        trainer.evaluate(data)
    begun, trains = state(trainer), [name for name, one in trainer.model.named_parameters() if one.requires_grad]
    trainer.train(resume_from="last" if then == "resume" else None)
    return {"begun": begun, "trains": trains, "trained": state(trainer)}


def differ(backend: str) -> None:
    """Make another model on each rank."""
    size = 4 + int(os.environ["RANK"])
    make_trainer(backend, nn.Linear(4, size), rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4)


def case(name: str, backend: str, function: str, **options: Any) -> Case:
    environment = {} if "zero" in backend else {"ACCELERATE_USE_CPU": "true"}
    return Case(name, f"test_start:{function}", {"backend": backend, **options}, environment=environment)


FILES = ("one.safetensors", "several", "plain.pt")
EMPTY = [0, 1]
KINDS = {"fsdp": ("llama", "gpt"), "zero3": ("llama", "gpt", "t5")}
"""Models of transformers; FSDP 2 of accelerate cannot divide T5's, whose embedding is shared with its halves."""


def cases(folder: Path) -> list[Case]:
    found = [case("others", "fsdp", "differ")]
    for backend in BACKENDS:
        found += [case(f"{backend} {empty}", backend, "start", empty=empty) for empty in ([], [1])]
        for file in FILES if backend in ("fsdp", "zero3") else FILES[:1]:
            found.append(case(f"{backend} {file}", backend, "start", empty=EMPTY, init_from=str(folder / file)))
    for backend in ("fsdp", "zero3"):
        real = {"init_from": str(folder / "other.safetensors")}
        found += [case(f"{backend} other {empty}", backend, "start", empty=empty, **real) for empty in ([], [1], EMPTY)]
        found.append(case(f"{backend} own", backend, "start", empty=EMPTY))
        half = {"autocast": "bf16", "kind": "llama", "init_from": str(folder / "llama")}
        found += [case(f"{backend} 16 {empty}", backend, "start", empty=empty, **half) for empty in ([], [1], EMPTY)]
        for kind in KINDS[backend]:
            options = {"kind": kind, "init_from": str(folder / kind)}
            found += [case(f"{backend} {kind} {one}", backend, "start", empty=one, **options) for one in ([], EMPTY)]
            found.append(case(f"{backend} {kind} own", backend, "start", empty=EMPTY, kind=kind))
        saves = {"kind": "bare", "save_dir": str(folder / backend), "save_steps": 1, "max_steps": 2}
        found.append(case(f"{backend} saves", backend, "start", empty=[], **saves))
    for backend in ("ddp", "fsdp", "zero3"):
        found.append(case(f"{backend} nowhere", backend, "start", empty=EMPTY, kind="bare"))
        found.append(case(f"{backend} evaluated", backend, "start", empty=EMPTY, kind="bare", then="evaluate"))
        found.append(case(f"{backend} derived", backend, "start", empty=EMPTY, kind="derived"))
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    compile_once()
    folder = tmp_path_factory.mktemp("start")
    weights = {name: one.clone() for name, one in made("net").state_dict().items()}
    del weights["twins.1.weight"]
    save_file(weights, folder / "one.safetensors")
    torch.save(weights, folder / "plain.pt")
    save_file({name: one.double() if one.is_floating_point() else one for name, one in weights.items()
               if not name.startswith("body.0")}, folder / "other.safetensors")  # fmt: skip
    (folder / "several").mkdir()
    for number, part in enumerate((list(weights)[::2], list(weights)[1::2])):
        save_file({name: weights[name] for name in part}, folder / "several" / f"{number}.safetensors")
    index = {name: f"{number % 2}.safetensors" for number, name in enumerate(weights)}
    (folder / "several" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for kind in ("llama", "gpt", "t5"):
        made(kind).save_pretrained(folder / kind)  # type: ignore[operator]
    found = play(cases(folder), folder / "cases")
    resumed = []
    for backend in ("fsdp", "zero3"):
        options = {"kind": "bare", "save_dir": str(folder / backend), "save_steps": 1, "max_steps": 2}
        resumed.append(case(f"{backend} resumes", backend, "start", empty=EMPTY, then="resume", **options))
        saved = str(folder / backend / "checkpoint-2")
        resumed.append(case(f"{backend} from it", backend, "start", empty=EMPTY, kind="bare", init_from=saved))
    found.update(play(resumed, folder / "resumed"))
    return found


def results(outcomes: dict[str, list[Outcome]], *names: str) -> list[Any]:
    for outcome in (one for name in names for one in outcomes[name]):
        assert outcome.code == 0, outcome.output
    return [[outcome.result for outcome in outcomes[name]] for name in names]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_begins_and_trains_alike_wherever_its_weights_are(
    backend: str, outcomes: dict[str, list[Outcome]]
) -> None:
    names = [f"{backend} {empty}" for empty in ([], [1])]
    names += [f"{backend} {file}" for file in (FILES if backend in ("fsdp", "zero3") else FILES[:1])]
    real, *others = results(outcomes, *names)
    expected = {name: one.float().flatten().tolist() for name, one in made("net").state_dict().items()}
    begun = real[0]["begun"]
    assert all(begun[name] == expected[name] for name in expected if name in begun) and "body.0.weight" in begun
    assert begun["buffer scale.factor"] == [0.5] and real[0]["begun"] == real[1]["begun"]
    assert real[0]["trained"] != begun and "wide.weight" in real[0]["trains"]
    assert "coarse.weight" not in real[0]["trains"]
    for name, other in zip(names[1:], others, strict=True):
        assert other == real, name


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero3"])
def test_a_buffer_of_several_modules_stays_one_and_has_its_values(backend: str, tmp_path: Path) -> None:
    weights = {name: one.clone() for name, one in made("shared").state_dict().items()}
    save_file(weights, tmp_path / "shared.safetensors")
    real, empty = f"{backend} real", f"{backend} empty"
    options: dict[str, Any] = {"kind": "shared", "max_steps": 2}
    from_file = {**options, "empty": EMPTY, "init_from": str(tmp_path / "shared.safetensors")}
    one = Case("one", "test_start:start", {"backend": "native", **options, "empty": [], "batch_size": 8}, processes=1)
    cases = [one, case(real, backend, "start", empty=[], **options), case(empty, backend, "start", **from_file)]
    found = play(cases, tmp_path / "cases")
    ((alone,), *others) = results(found, "one", real, empty)
    for ranks in others:
        assert ranks[0] == ranks[1] and ranks[0]["begun"] == ranks[1]["begun"]
        for moment in ("begun", "trained"):
            assert ranks[0][moment].keys() == alone[moment].keys()
            for name, values in ranks[0][moment].items():
                assert values == pytest.approx(alone[moment][name.replace("blocks.1.mask", "blocks.0.mask")]), name
            assert ranks[0][moment]["buffer blocks.1.mask"] == [1.0, 2.0, 3.0, 0.0]
            assert ranks[0][moment]["buffer blocks.1.scale.factor"] == [0.5]


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_files_with_other_dtypes_are_cast_as_on_one_process(backend: str, outcomes: dict[str, list[Outcome]]) -> None:
    real, main, nowhere = results(outcomes, *(f"{backend} other {empty}" for empty in ([], [1], EMPTY)))
    assert main == real
    for name, values in real[0]["begun"].items():
        assert name.startswith("body.0") or nowhere[0]["begun"][name] == values, name
    drawn = nowhere[0]["begun"]["body.0.weight"]  # is not in the file: the module draws it
    assert drawn == nowhere[1]["begun"]["body.0.weight"] and 0.1 < torch.tensor(drawn).abs().max() <= 0.5


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_weights_begin_alike_where_the_backend_casts_them(backend: str, outcomes: dict[str, list[Outcome]]) -> None:
    real, main, nowhere = results(outcomes, *(f"{backend} 16 {empty}" for empty in ([], [1], EMPTY)))
    assert main == real == nowhere and real[0]["begun"] != real[0]["trained"]


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_weights_that_nobody_has_are_drawn_by_the_modules_on_the_main_rank(
    backend: str, outcomes: dict[str, list[Outcome]]
) -> None:
    (own,), expected = results(outcomes, f"{backend} own"), Net()
    begun = own[0]["begun"]
    assert begun == own[1]["begun"] and begun["buffer scale.factor"] == [0.5]
    assert begun["norm.weight"] == [1.0] * 5 and begun["norm.running_mean"] == [0.0] * 5
    torch.manual_seed(5)
    for module in expected.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    drawn = {name: one.float().flatten().tolist() for name, one in expected.state_dict().items()}
    assert begun["body.0.weight"] == drawn["body.0.weight"] and begun["frozen.bias"] == drawn["frozen.bias"]


@pytest.mark.parametrize(("backend", "kind"), [(backend, kind) for backend in KINDS for kind in KINDS[backend]])
def test_models_of_transformers_need_no_memory_to_begin(
    backend: str, kind: str, outcomes: dict[str, list[Outcome]]
) -> None:
    real, empty, own = results(outcomes, *(f"{backend} {kind} {one}" for one in ([], EMPTY, "own")))
    assert empty == real
    begun = own[0]["begun"]
    for name, values in real[0]["begun"].items():
        if name.startswith("buffer"):
            assert begun[name] == values, name
        wanted, drawn = torch.tensor(values), torch.tensor(begun[name])
        if wanted.numel() > 100:  # as spread as transformers draws them
            assert 0.7 < drawn.std() / wanted.std() < 1.4 or wanted.std() == 0 == drawn.std(), name


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero3"])
@pytest.mark.parametrize("then", ["nowhere", "evaluated"])
def test_weights_that_nothing_makes_are_an_error_on_all_that_says_what_to_do(
    backend: str, then: str, outcomes: dict[str, list[Outcome]]
) -> None:
    for outcome in outcomes[f"{backend} {then}"]:
        assert outcome.code == 1
        assert "ConfigError: 1 tensors of the main rank's model are on the meta device" in outcome.output
        assert "weight (Bare)" in outcome.output and "init_from" in outcome.output
        assert "reset_parameters" in outcome.output and "resume_from" in outcome.output


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero3"])
def test_a_buffer_that_no_file_has_and_nothing_computes_is_an_error(
    backend: str, outcomes: dict[str, list[Outcome]]
) -> None:
    for outcome in outcomes[f"{backend} derived"]:
        assert outcome.code == 1 and "nothing computes 1 of its buffers" in outcome.output
        assert "table (Derived)" in outcome.output


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_a_model_without_weights_resumes_and_begins_with_a_checkpoint(
    backend: str, outcomes: dict[str, list[Outcome]]
) -> None:
    saved, resumed, begun = results(outcomes, *(f"{backend} {one}" for one in ("saves", "resumes", "from it")))
    assert [one["trained"] for one in resumed] == [one["trained"] for one in saved]
    assert [one["begun"] for one in begun] == [one["trained"] for one in saved]


def test_models_that_differ_are_an_error_on_all_that_names_where(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["others"]:
        assert outcome.code == 1
        assert (
            'The models of the ranks differ: `weight` is "torch.float32 of shape (4, 4), which trains" on rank 0'
            in outcome.output
        )
