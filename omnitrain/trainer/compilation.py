"""Compiling ahead of a run: `trainer.compile()`.

`backends/` chooses what is compiled.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, find_overrides
from omnitrain.data.collation import tensors_in
from omnitrain.data.loaders import by_name
from omnitrain.data.sampling import Window
from omnitrain.trainer.buffers import unchanged_buffers
from omnitrain.trainer.hooks import members_of_user
from omnitrain.trainer.loop import Loop

logger: logging.Logger = logging.getLogger("omnitrain")


class Compiled(NamedTuple):
    """The result of `trainer.compile()`, on this rank.

    Attributes:
        seconds: How long it took.
        graphs: How many graphs were compiled; 0 if all of them were compiled already.
        breaks: The graph breaks as `torch.compile` reports them, and how often.
        shapes: The shapes of the batches that were run, by "train", "eval" or the names of the evaluation sets.
    """

    seconds: float
    graphs: int
    breaks: dict[str, int]
    shapes: dict[str, list[str]]


def check_compilable(loop: Loop, steps: Any) -> None:
    """Reject compiling ahead where it would compile something else than the run."""
    trainer = loop.trainer
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"`steps` of `compile()` must be a positive integer, got {steps!r}.")
    overrides = [name for name in ("_train_epoch", "_train_step") if name in members_of_user(type(trainer))]
    if overrides:
        raise ConfigError(
            f"`compile()` cannot know what {type(trainer).__name__}.{overrides[0]} runs, which is your own. Run a "
            "batch of each shape through `trainer.model_wrapped`, forward and backward, or leave it out: the run "
            "compiles."
        )


def compile_ahead(loop: Loop, steps: int) -> Compiled:
    """Run batches of the first steps, of the last one and of evaluations, so that what runs them is compiled."""
    from torch._dynamo.utils import counters  # seconds to load, and loaded only where something is compiled

    trainer, ranks, begin = loop.trainer, loop.ranks, time.perf_counter()
    ranks.check_equal("The arguments of compile()", {"steps": steps}, "Call it alike on every rank.")
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    states = [copy.deepcopy(algorithm.state_dict()) for algorithm in trainer.algorithms]
    shapes: dict[str, list[str]] = {}
    progress, loop.lifecycle.progress = loop.lifecycle.progress, copy.copy(loop.lifecycle.progress)
    try:
        for start in find_overrides(trainer.algorithms, "begin_epoch"):
            start(trainer)
        with unchanged_buffers(trainer.backend.model):
            with loop.sets.train.preserve_state():
                for window, window_shapes in _windows_of_new_shapes(loop, steps):
                    shapes.setdefault("train", []).extend(window_shapes)
                    loop.step.dry_run(window)
            for name, loader in by_name(loop.sets.eval).items() if loop.lifecycle.evaluates else ():
                batches = loop.evaluation.rehearse_batches(loader)
                shapes[name or "eval"] = list(dict.fromkeys(map(_shape_of, batches)))
    finally:
        loop.lifecycle.progress = progress
        for algorithm, state in zip(trainer.algorithms, states, strict=True):
            for forget in find_overrides([algorithm], "set_up"):
                forget(trainer)
            if type(algorithm).state_dict is not Algorithm.state_dict:
                algorithm.load_state_dict(state)
    compiled = Compiled(
        time.perf_counter() - begin,
        counters["stats"]["unique_graphs"] - graphs,
        {_brief(why): count - breaks.get(why, 0) for why, count in counters["graph_break"].items()
         if count > breaks.get(why, 0)},
        shapes,
    )  # fmt: skip
    _log_compiled(loop, compiled)
    return compiled


def _windows_of_new_shapes(loop: Loop, steps: int) -> Iterator[tuple[Window, list[str]]]:
    """Yield the first steps of a run, and the last one of its first epoch, without batches of known shapes.

    With each window come the shapes of its batches, as the model sees them.

    All ranks run the same batches, as they wait for each other in them: those of a new shape on any rank.
    """
    known = set[str]()
    lifecycle, loader = loop.lifecycle, loop.sets.train
    per_step = loop.feed.accumulation
    last = loader.last_step(per_step)
    for position, limit in ((0, steps), *([] if last is None else [(last, 1)])):
        size = lifecycle.progress.epoch_size or 0
        done = round(position / size * -(-len(loader) // per_step)) if position else 0
        lifecycle.progress = replace(lifecycle.progress, samples_in_epoch=position, step=done, step_in_epoch=done)
        windows = loop.feed.windows(loader, 0, lifecycle.progress)
        for _, window in zip(range(limit), windows, strict=False):
            shapes = [_shape_of(transformed(loop, batch)) for batch in window.batches]
            is_new = [shape not in known and shape not in shapes[:turn] for turn, shape in enumerate(shapes)]
            marks = loop.ranks.gather("the shapes of a step", is_new)
            turns = [turn for turn, each in enumerate(zip(*marks, strict=True)) if any(each)]
            known.update(shapes)
            if turns and window.weight:
                batches, weights = ([of[turn] for turn in turns] for of in (window.batches, window.weights))
                origins = turns if window.origins is None else [window.origins[turn] for turn in turns]
                yield (
                    replace(window, batches=batches, weights=weights, origins=origins),
                    [shapes[turn] for turn in turns],
                )
            lifecycle.progress.advance(window.samples, window.tokens, batches=window.micro_batches)
        loader.close()


def transformed(loop: Loop, batch: Any, prepares: bool = False) -> Any:
    """Return a training batch as algorithms make it, which may be longer or larger in later steps.

    It is prepared for the model if there are any, or if that is asked for.
    """
    transforms = find_overrides(loop.trainer.algorithms, "transform_batch")
    if transforms or prepares:
        batch = loop.trainer._prepare_batch(batch)
    for transform in transforms:
        batch = transform(loop.trainer, batch)
    return batch


def _shape_of(batch: Any) -> str:
    """Return the shapes of the tensors of a batch: "x [8, 4], labels [8]"."""
    if isinstance(batch, Mapping):
        return ", ".join(f"{name} {list(tensor.shape)}" for name in batch for tensor in tensors_in(batch[name]))
    return ", ".join(str(list(tensor.shape)) for tensor in tensors_in(batch))


def _brief(reason: str) -> str:
    """Return the first paragraph of a reason, without the places in PyTorch that follow it."""
    return " ".join(reason.split("\n\n")[0].split())


def _log_compiled(loop: Loop, compiled: Compiled) -> None:
    if not loop.ranks.is_main:
        return
    details = "".join(f"\n  {name}: {'; '.join(shapes)}" for name, shapes in compiled.shapes.items())
    details += "".join(f"\n  graph break ({count} times): {why}" for why, count in compiled.breaks.items())
    logger.info("Compiled %d graphs ahead of the run in %.1f s.%s", compiled.graphs, compiled.seconds, details)
    if not compiled.graphs and loop.settings.compile in (None, False):
        logger.warning(
            "`compile()` has run the first batches, and nothing of the model was compiled. Pass compile=True, or "
            "compile parts of the model with `torch.compile`."
        )
