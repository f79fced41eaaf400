"""The `omnitrain` command: its arguments, and its exit codes.

Each subcommand is one function that adds its parser; what a subcommand does is in a module of its own, imported when
it runs, so that `--help` and a mistyped option are answered without waiting for torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import omnitrain
from omnitrain.errors import ConfigError, OmnitrainError

__all__ = ["main"]

TRAINERS = {"native": "Trainer", "accelerate": "AccelerateTrainer", "hf": "HFTrainer"}
"""The public class behind each choice of `--trainer`."""

DATA = {
    "digits": "a convolutional network on scikit-learn's handwritten digits, in seconds",
    "stdlib": "a character-level GPT on the source of Python's standard library, in about a minute",
}
"""The functions of `omnitrain.demo` behind each choice of `--data`, and what they train."""

_CHECKPOINT = "a run's folder (its last checkpoint then), a checkpoint's folder, or RUN/last or RUN/best"
_RUN = "a run's folder (all of its checkpoints then), a checkpoint's folder, or RUN/last or RUN/best"
CHECKPOINT = {
    "ls": ("List the checkpoints: step, epoch, score, which is last and best, size, whether it is complete.", [_RUN]),
    "verify": ("Read every file and compare it with its hash; exit code 1 names what is damaged.", [_RUN]),
    "show": ("Print progress, objective, settings, versions and tensors of a checkpoint.", [_CHECKPOINT]),
    "export": (
        "Write the weights and the model's config, or the adapters of PEFT, as a folder of their own.",
        [_CHECKPOINT, "a new folder"],
    ),
    "diff": ("List changed settings and the largest differences of the weights.", [_CHECKPOINT, _CHECKPOINT]),
}
"""The functions of `omnitrain.checkpoint_cli` behind `omnitrain checkpoint`: what they do, and the paths they take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `omnitrain` command and return its exit code.

    0 is done, 1 an error, 2 a wrong option or path, 130 a run ended by Ctrl-C; SIGTERM ends it with SystemExit(143).
    `launch` passes on the exit code of the script.

    Args:
        argv: The words after the command's name; None takes the process's own.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("omnitrain: stopped by Ctrl-C.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `omnitrain demo | head`: whoever read us has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails once more
        return 1
    except (OmnitrainError, OSError) as error:
        print(f"omnitrain: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnitrain", description="PyTorch trainers that give the same numbers everywhere.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"omnitrain {omnitrain.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in (_add_demo, _add_launch, _add_checkpoint):
        add(commands)
    return parser


def _add_demo(commands: Any) -> None:
    about = "Train on real data that is already on this machine, without a network."
    demo = commands.add_parser("demo", help=about, description=about, allow_abbrev=False)
    demo.add_argument("--trainer", choices=TRAINERS, default="native", help="which trainer (default: %(default)s)")
    demo.add_argument(
        "--data",
        choices=DATA,
        default="digits",
        help="; ".join(f"{name}: {what}" for name, what in DATA.items()) + " (default: %(default)s)",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="FOLDER",
        help="where weights, metrics and curves go; an earlier demo there is replaced (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    from omnitrain import demo

    trainer_class = getattr(omnitrain, TRAINERS[args.trainer])
    getattr(demo, args.data)(trainer_class, args.out)


def _add_launch(commands: Any) -> None:
    about = "Start a script that uses AccelerateTrainer on several processes, with or without GPUs."
    launch = commands.add_parser(
        "launch",
        help=about,
        description=f"{about} Its exit code is the script's.",
        allow_abbrev=False,
        usage="omnitrain launch [-n N] [--fsdp | --zero {1,2,3}] [options] [-m] script [arguments of the script]",
    )
    add = launch.add_argument
    add("-n", dest="processes", type=int, default=1, metavar="N", help="processes on this machine (default: 1)")
    way = launch.add_mutually_exclusive_group()
    way.add_argument("--fsdp", action="store_true", help="cut parameters, gradients and optimizer state up by FSDP 2")
    way.add_argument("--zero", type=int, choices=(1, 2, 3), help="cut them up by DeepSpeed ZeRO, in this stage")
    add("--cpu", action="store_true", help="keep off the GPUs; the default where there are none")
    add("--nnodes", dest="machines", type=int, default=1, metavar="N", help="machines; start the same on each of them")
    add("--rdzv-endpoint", dest="endpoint", metavar="HOST:PORT", help="where the machines meet: one of them")
    add("--max-restarts", type=int, default=0, metavar="N", help="restart all processes if one dies, at most N times")
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module, as in `python -m`")
    add("script", help="the script, or module")
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    launch.set_defaults(run=_launch)


def _launch(args: argparse.Namespace) -> int:
    from omnitrain import launch

    options = {name: value for name, value in vars(args).items() if name != "run"}
    try:
        return launch.start(launch.Launch(**options))
    except ConfigError as error:
        print(f"omnitrain: {error}", file=sys.stderr)
        return 2


def _add_checkpoint(commands: Any) -> None:
    about = "Look into the checkpoints of a run."
    checkpoint = commands.add_parser("checkpoint", help=about, description=about, allow_abbrev=False)
    actions = checkpoint.add_subparsers(title="commands", metavar="command", required=True)
    for name, (what, paths) in CHECKPOINT.items():
        action = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
        metavars = {"export": ("CHECKPOINT", "OUT"), "diff": ("A", "B")}.get(name, ("RUN",))
        for number, (metavar, path) in enumerate(zip(metavars, paths, strict=True)):
            action.add_argument(f"path{number}", type=Path, metavar=metavar, help=path)
        if name == "export":
            about = (
                "merge adapters into their base, or add what did not train to what did: the folder of the base's "
                "weights, or nothing if the checkpoint has them (save_frozen=True)"
            )
            action.add_argument("--merge", nargs="?", type=Path, const=True, default=False, metavar="BASE", help=about)
            action.add_argument("--adapter", metavar="NAME", help="which of several adapters is merged")
        action.set_defaults(run=_checkpoint, action=name)


def _checkpoint(args: argparse.Namespace) -> int | None:
    from omnitrain import checkpoint_cli

    paths = [value for name, value in vars(args).items() if name.startswith("path")]
    options = {name: getattr(args, name) for name in ("merge", "adapter") if name in args}
    try:
        return getattr(checkpoint_cli, args.action)(*paths, **options)
    except ConfigError as error:  # a path that is none of what it should be: as wrong as a wrong option
        print(f"omnitrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
