"""Tokens per second, MFU and peak memory of the three trainers on a small GPT in bf16, against two others.

    python benchmarks/throughput.py [--quick] [--compile] [--seconds N] [--json FILE]

The others are a loop written by hand and `transformers.Trainer`. All variants train the same model from the same
weights on the same samples in the same order, in turns within each round; how to read the figures is in README.md
beside this file. It runs on the first GPU, or on the CPU, where only `--quick` makes sense.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _report import show_throughput
from _timing import Spread
from overhead import SEED, Losses, SameOrder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from omnitrain import AccelerateTrainer, Trainer

HAND, AGAIN, STOCK = "hand-written loop", "hand-written loop again (A/A)", "transformers.Trainer"
TOLERANCE = 0.02
"""How far logged losses may be from those of the hand-written loop, relative to them."""

PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
    "A100": 312e12, "A30": 165e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 of each second, by what the name of a GPU holds, from the makers' data sheets; the longest name counts."""


# --- what is trained


@dataclass(slots=True)
class Work:
    """A training run, the same for every variant."""

    layers: int
    width: int
    heads: int
    words: int
    length: int
    batch_size: int
    steps: int
    warm_up: int
    log_every: int
    device: torch.device
    compiled: bool = False
    learning_rate: float = 3e-4

    @property
    def tokens(self) -> int:
        """Of the steps that are measured."""
        return (self.steps - self.warm_up) * self.batch_size * self.length


def work_for(device: torch.device, quick: bool, compiled: bool) -> Work:
    """Return GPT-2 small with a batch that fits the device; with `quick` a tiny one."""
    if quick:
        return Work(2, 32, 2, 64, 16, 2, 8, 2, 2, device, compiled)
    room = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else 8
    batch_size = next((size for need, size in ((38, 16), (20, 8), (11, 4)) if room >= need), 2)
    return Work(12, 768, 12, 50304, 1024, batch_size, 40, 10, 10, device, compiled)


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens in memory, of which few are frequent, so that something is learnt at once."""

    def __init__(self, work: Work) -> None:
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.rand(work.steps * work.batch_size, work.length, generator=generator)
        self.tokens = (drawn**6 * work.words).long()
        self.labels = self.tokens.clone()
        self.labels[:, 0] = -100  # nothing predicts it, and not every trainer knows that

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class PlainBlock(nn.Module):
    """A layer of `PlainGPT`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        width = work.width
        self.heads, self.before, self.between = work.heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.between(x))


class PlainGPT(nn.Module):
    """GPT-2 in plain PyTorch, where transformers is not installed."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(work.words, work.width), nn.Embedding(work.length, work.width)
        self.blocks = nn.Sequential(*(PlainBlock(work) for _ in range(work.layers)))
        self.last = nn.LayerNorm(work.width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.last(self.blocks(self.words(input_ids) + self.places(places)))
        logits = hidden @ self.words.weight.T.to(hidden.dtype)
        return {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()),
            "logits": logits,
        }


def make_model(work: Work) -> nn.Module:
    """Return the model on the host."""
    torch.manual_seed(SEED)
    if find_spec("transformers") is None:
        return PlainGPT(work)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=work.words, n_positions=work.length, n_embd=work.width, n_layer=work.layers, n_head=work.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def flops_per_token(model: nn.Module, work: Work) -> float:
    """Return the operations of forward and backward: 6 for each parameter but the positions', and all attention."""
    positions = work.length * work.width
    parameters = sum(parameter.numel() for parameter in model.parameters()) - positions
    return 6.0 * parameters + 12.0 * work.layers * work.width * work.length


def peak_flops(device: torch.device) -> float | None:
    """Return what the device can do at most in bf16; None if that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = sorted((key for key in PEAK_FLOPS if key in name), key=len)
    return PEAK_FLOPS[known[-1]] if known else None


# --- a run


class Clock:
    """A schedule's factor for each step, which notes the time when the warm-up is over and at the last step.

    Every variant steps its schedule once in every step, after the update.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.stamps: dict[int, float] = {}
        self.peak_memory: int | None = None

    def __call__(self, step: int) -> float:
        work = self.work
        if step in (work.warm_up, work.steps) and step not in self.stamps:
            if work.device.type == "cuda":
                torch.cuda.synchronize(work.device)
                if step == work.steps:
                    self.peak_memory = torch.cuda.max_memory_allocated(work.device)
                torch.cuda.reset_peak_memory_stats(work.device)
            self.stamps[step] = time.perf_counter()
        return 0.5 * (1.0 + math.cos(math.pi * step / work.steps))

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, self)

    @property
    def seconds(self) -> float:
        """Of the steps that are measured."""
        return self.stamps[self.work.steps] - self.stamps[self.work.warm_up]


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        steps: Updates that were made.
        losses: Those that were logged.
        seconds: What the measured steps took.
        peak_memory: What was allocated at most during these, in bytes.
    """

    steps: int
    losses: list[float]
    seconds: float
    peak_memory: int | None


def adamw(work: Work) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=work.learning_rate, weight_decay=0.0, fused=True)


def by_hand(work: Work, model: nn.Module, data: Texts) -> Outcome:
    """Run the loop that one writes with care."""
    clock, device = Clock(work), work.device
    run: Any = torch.compile(model) if work.compiled else model
    optimizer = adamw(work)(model.parameters())
    scheduler = clock.schedule(optimizer)
    pins = device.type == "cuda"
    loader = DataLoader(data, work.batch_size, sampler=SameOrder(len(data)), pin_memory=pins)
    total, losses, step = torch.zeros((), device=device), list[float](), 0
    model.train()
    for batch in loader:
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = run(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total += loss.detach()
        step += 1
        if step % work.log_every == 0:
            losses.append(total.item() / work.log_every)
            total.zero_()
    return Outcome(step, losses, clock.seconds, clock.peak_memory)


def by_trainer(work: Work, model: nn.Module, data: Texts, kind: Any = Trainer) -> Outcome:
    """Run Trainer or AccelerateTrainer."""
    clock, losses = Clock(work), Losses()
    place = {"device": work.device} if kind is Trainer else {}
    trainer = kind(
        torch.compile(model) if work.compiled else model, data, epochs=None, max_steps=work.steps,
        batch_size=work.batch_size, optimizer=adamw(work), lr_scheduler=clock.schedule, max_grad_norm=1.0,
        log_steps=work.log_every, autocast="bf16", seed=SEED, callbacks=[losses], progress_bar=False, **place,
    )  # fmt: skip
    trainer.train()
    return Outcome(trainer.progress.step, losses.logged, clock.seconds, clock.peak_memory)


def training_arguments(work: Work, folder: str) -> Any:
    """Return the arguments of both HFTrainer and the stock Trainer."""
    from transformers import TrainingArguments

    on_cpu = work.device.type == "cpu"
    return TrainingArguments(
        folder, per_device_train_batch_size=work.batch_size, max_steps=work.steps, logging_steps=work.log_every,
        max_grad_norm=1.0, bf16=True, torch_compile=work.compiled, seed=SEED, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=on_cpu, dataloader_pin_memory=not on_cpu,
    )  # fmt: skip


def by_hf_trainer(work: Work, model: nn.Module, data: Texts) -> Outcome:
    """Run HFTrainer."""
    from omnitrain import HFTrainer

    clock, losses = Clock(work), Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = HFTrainer(
            model, training_arguments(work, folder), data, optimizer=adamw(work), lr_scheduler=clock.schedule,
            callbacks=[losses], progress_bar=False,
        )  # fmt: skip
        trainer.train()
    return Outcome(trainer.progress.step, losses.logged, clock.seconds, clock.peak_memory)


def by_stock(work: Work, model: nn.Module, data: Texts) -> Outcome:
    """Run `transformers.Trainer`, of which only the order of samples is set."""
    import transformers

    class Stock(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> SameOrder:
            return SameOrder(len(data))

    clock = Clock(work)
    optimizer = adamw(work)(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        stock = Stock(
            model, training_arguments(work, folder), train_dataset=data,
            optimizers=(optimizer, clock.schedule(optimizer)),
        )  # fmt: skip
        stock.remove_callback(transformers.PrinterCallback)
        stock.train()
    losses = [row["loss"] for row in stock.state.log_history if "loss" in row]
    return Outcome(stock.state.global_step, losses, clock.seconds, clock.peak_memory)


def by_accelerate_trainer(work: Work, model: nn.Module, data: Texts) -> Outcome:
    """Run AccelerateTrainer."""
    return by_trainer(work, model, data, AccelerateTrainer)


VARIANTS: dict[str, Callable[[Work, nn.Module, Texts], Outcome]] = {
    HAND: by_hand,
    AGAIN: by_hand,
    "Trainer": by_trainer,
    "AccelerateTrainer": by_accelerate_trainer,
    "HFTrainer": by_hf_trainer,
    STOCK: by_stock,
}
NEEDS = {"HFTrainer": "transformers", STOCK: "transformers"}


# --- measuring


@dataclass(slots=True)
class Taken:
    """What was measured of a variant, round by round; with a reason, why it was not.

    Attributes:
        status: "measured", "skipped", "failed" or "not comparable".
        seconds: By round; the rounds of all variants that are measured are as many.
    """

    status: str = "measured"
    reason: str = ""
    seconds: dict[int, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    peak_memory: int | None = None


@contextlib.contextmanager
def leaving_nothing(device: torch.device) -> Iterator[None]:
    """Free afterwards what a run has left, so that each begins with the same memory."""
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset() if "torch._dynamo" in sys.modules else None


def differs(outcome: Outcome, expected: Outcome | None, work: Work) -> str:
    """Return why a run cannot be compared with the hand-written one; empty if it can."""
    if outcome.steps != work.steps:
        return f"{outcome.steps} steps instead of {work.steps}"
    if len(outcome.losses) != work.steps // work.log_every:
        return f"{len(outcome.losses)} losses were logged instead of {work.steps // work.log_every}"
    if not all(map(math.isfinite, outcome.losses)):
        return f"its losses are not finite: {outcome.losses}"
    pairs = zip(outcome.losses, expected.losses if expected else outcome.losses, strict=True)
    furthest = max(abs(loss - expected_loss) / expected_loss for loss, expected_loss in pairs)
    return f"its losses are {100 * furthest:.1f} % off" if furthest > TOLERANCE else ""


def measure(work: Work, seconds: float, rounds: int, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all variants in turns, and return what was found; `report` is told after each run.

    Args:
        work: What to train.
        seconds: A round is begun only if one like that before it would end in time.
        rounds: How many at most, besides one to warm up.
        report: Called with what has been found so far.
    """
    started = time.perf_counter()
    data, base = Texts(work), make_model(work)
    measurements = {name: Taken() for name in VARIANTS}
    for name, package in NEEDS.items():
        if find_spec(package) is None:
            measurements[name] = Taken("skipped", f"{package} is not installed")
    expected: Outcome | None = None
    length = 0.0
    for number in range(-1, rounds):
        round_start = time.perf_counter()
        if number > 0 and round_start - started + length > seconds:
            break
        names = [name for name in VARIANTS if measurements[name].status == "measured"]
        turn = max(number, 0) % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            measurement = measurements[name]
            print(f"round {number}: {name} ...", file=sys.stderr, flush=True)
            with leaving_nothing(work.device):
                try:
                    outcome = VARIANTS[name](work, copy.deepcopy(base).to(work.device), data)
                except Exception as error:
                    traceback.print_exc()
                    measurement.status, measurement.reason = (
                        "failed",
                        f"{type(error).__name__}: {str(error).splitlines()[0][:300]}",
                    )
                    del error
                    report(summary(work, base, measurements))
                    continue
            expected = expected or (outcome if name == HAND else None)
            why = differs(outcome, expected, work)
            if why:
                measurement.status, measurement.reason = "not comparable", why
            elif number >= 0:
                measurement.seconds[number] = outcome.seconds
            measurement.losses, measurement.peak_memory = outcome.losses, outcome.peak_memory
            report(summary(work, base, measurements))
        length = time.perf_counter() - round_start
    return summary(work, base, measurements)


def summary(work: Work, model: nn.Module, measurements: dict[str, Taken]) -> dict[str, Any]:
    """Return what was found, as JSON types."""
    peak, per_token = peak_flops(work.device), flops_per_token(model, work)
    rows = []
    for name, measurement in measurements.items():
        row: dict[str, Any] = {
            "variant": name,
            "status": measurement.status,
            "reason": measurement.reason,
            "losses": measurement.losses,
        }
        if measurement.status == "measured" and not measurement.seconds:
            row |= {"status": "not measured", "reason": "out of time"}
        elif measurement.status == "measured":
            speeds = [work.tokens / value for value in measurement.seconds.values()]
            speed = statistics.median(speeds)
            row |= {
                "tokens_per_second": speed,
                "mfu": None if peak is None else speed * per_token / peak,
                "peak_memory": measurement.peak_memory,
                "to_hand": _ratios(measurement, measurements[HAND]),
                "to_stock": _ratios(measurement, measurements[STOCK]),
                "seconds": list(measurement.seconds.values()),
            }
        rows.append(row)
    on_gpu = work.device.type == "cuda"
    counted = f"MFU counts {per_token / 1e6:.0f} MFLOP for a token, "
    limit = "" if peak is None else f"of {peak / 1e12:.0f} TFLOP/s."
    about = {
        **asdict(work),
        "device": torch.cuda.get_device_name(work.device) if on_gpu else "a CPU",
        "model": "GPT-2 of transformers" if find_spec("transformers") else "a GPT in plain PyTorch",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": "bf16",
        "flops_per_token": per_token,
        "peak_flops": peak,
        "mfu": counted + limit if limit else "MFU is not known for this device.",
    }
    return {
        "work": about,
        "rounds": max(len(measurement.seconds) for measurement in measurements.values()),
        "rows": rows,
    }


def _ratios(measurement: Taken, reference: Taken) -> Spread | None:
    """Return how many times as fast as the reference, in the rounds that both have."""
    both = [number for number in measurement.seconds if number in reference.seconds]
    if measurement is reference or not both:
        return None
    return Spread.of([reference.seconds[number] / measurement.seconds[number] for number in both])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model for seconds; the figures mean little")
    parser.add_argument("--compile", action="store_true", help="each variant with torch.compile")
    parser.add_argument("--seconds", type=float, default=150, help="begin no round that would end later")
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, after each run")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    work = work_for(device, options.quick, options.compile)

    def report(results: dict[str, Any]) -> None:
        if options.json is not None:
            part = options.json.with_suffix(".part")
            part.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            part.replace(options.json)

    results = measure(work, options.seconds, options.rounds or (1 if options.quick else 7), report)
    report(results)
    print("\n".join(show_throughput(results)))
    if any(row["status"] in ("failed", "not comparable") for row in results["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
