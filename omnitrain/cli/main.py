"""The `omnitrain` command: its arguments, and its exit codes.

Each subcommand is a function that adds its parser, and one that runs it, whose docstring is its help. Its work is in a
separate module, imported when it runs, so `--help` and a mistyped option are answered without waiting for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import omnitrain
from omnitrain.core.errors import ConfigError, OmnitrainError, did_you_mean

# The public class behind each choice of `--trainer`.
TRAINERS = {"native": "Trainer", "accelerate": "AccelerateTrainer", "hf": "HFTrainer"}

_CHECKPOINT = "the folder of a run (for its last checkpoint) or of a checkpoint, or RUN/last or RUN/best"
_RUN = "the folder of a run (for all its checkpoints) or of a checkpoint, or RUN/last or RUN/best"
# The functions in `omnitrain.cli.checkpoint` behind `omnitrain checkpoint`: what they do, and the paths they take.
CHECKPOINT = {
    "ls": (
        "List the checkpoints: step, epoch, score, last or best, size, and whether they are complete.", {"RUN": _RUN}
    ),
    "verify": (
        "Compare every file with its hash; name damaged files, and exit with code 1 if there are any.", {"RUN": _RUN}
    ),
    "show": ("Print the progress, objective, settings, versions and tensors of a checkpoint.", {"RUN": _CHECKPOINT}),
    "record": (
        "Print the starts of a run: when, on what, with which command, code, packages, settings and data, and what has "
        "changed since the start before.", {"RUN": "the folder of a run, or of a checkpoint"}
    ),
    "export": (
        "Write the weights and the model's config, or the PEFT adapters, to a new folder.",
        {"CHECKPOINT": _CHECKPOINT, "OUT": "a new folder"},
    ),
    "diff": (
        "List changed settings and the largest differences in the weights.", {"A": _CHECKPOINT, "B": _CHECKPOINT}
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `omnitrain` command and return its exit code.

    0: success, 1: an error, 2: a wrong option, path or value, 130: ended by Ctrl-C; SIGTERM raises SystemExit(143).
    `launch` returns the exit code of the script.

    Args:
        argv: The arguments after the command's name; None takes those of the process.
    """
    try:
        try:
            parser, commands = _parser()
            argv = sys.argv[1:] if argv is None else argv
            if not argv:
                parser.print_help()
                return 0
            if not argv[0].startswith("-") and argv[0] not in commands:
                hint = did_you_mean(argv[0], commands) or f" There are {', '.join(commands)}."
                parser.error(f"there is no command {argv[0]!r}.{hint}")
            args, words = parser.parse_known_args(argv)
            if "words" in args:
                args.words = words
            elif words:
                parser.error(f"unrecognized arguments: {' '.join(words)}")
            return args.run(args) or 0
        finally:
            print(end="", flush=True)  # as errors at the end of the process cannot be caught
    except KeyboardInterrupt:
        print("omnitrain: stopped by Ctrl-C.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `omnitrain train --help | head -1`: the reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit fails again
        return 1
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the error of the other ranks is the same
            print(f"omnitrain: {error}", file=sys.stderr)
        return 2
    except (OmnitrainError, OSError) as error:
        print(f"omnitrain: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser, and the names of its commands."""
    parser = argparse.ArgumentParser(
        prog="omnitrain", description="PyTorch trainers that give the same numbers everywhere.", allow_abbrev=False,
        usage=f"omnitrain [--help] [--version] {_ANY_COMMAND} ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"omnitrain {omnitrain.__version__}")
    commands = parser.add_subparsers(prog="omnitrain", metavar=_ANY_COMMAND, required=True, help=argparse.SUPPRESS)
    groups = {
        "train": (_add_demo, _add_train, _add_sweep, _add_launch, _add_config),
        "prove": (_add_check, _add_plan, _add_verify, _add_drill, _add_parity, _add_diff, _add_replay),
        "look": (_add_checkpoint, _add_compare),
    }
    sections = []
    for title, adders in groups.items():
        first = len(commands.choices)
        for add in adders:
            add(commands)
        lines = [_help_line(name, command) for name, command in [*commands.choices.items()][first:]]
        sections.append("\n".join([f"{title}:", *lines]))
    parser.epilog = "\n\n".join(sections)
    return parser, [*commands.choices]


_ANY_COMMAND = "COMMAND"


def _help_line(name: str, parser: argparse.ArgumentParser) -> str:
    sentence = str(parser.description).partition(". ")[0].removesuffix(".")
    return f"  {name:<12}{sentence}"


def _add_command(commands: Any, name: str, about: str, more: str = "", **options: Any) -> argparse.ArgumentParser:
    """Return the parser of a new command, with a line about it and more for its own help."""
    if commands.metavar != _ANY_COMMAND:  # those are listed in groups
        options["help"] = about
    return commands.add_parser(name, description=f"{about} {more}".strip(), allow_abbrev=False, **options)


def _add_function(commands: Any, run: Callable[[argparse.Namespace], Any], **options: Any) -> argparse.ArgumentParser:
    """Return the parser of the command that a function runs, with the name and the docstring of the function."""
    about, _, more = (run.__doc__ or "").partition("\n\n")
    command = _add_command(commands, run.__name__.lstrip("_"), about, " ".join(more.split()), **options)
    command.set_defaults(run=run)
    return command


def _call(name: str, args: argparse.Namespace) -> int | None:
    """Call a function of `omnitrain.cli` with the options of a command, which have the names of its arguments."""
    module, _, function = name.rpartition(".")
    options = {option: value for option, value in vars(args).items() if option != "run"}
    return getattr(import_module(f"omnitrain.cli.{module}"), function)(**options)


def _add_demo(commands: Any) -> None:
    add = _add_function(commands, _demo).add_argument
    add("--trainer", choices=TRAINERS, default="native", help="the trainer to use (default: %(default)s)")
    about = "folder for weights, metrics and curves; an earlier demo in it is replaced (default: %(default)s)"
    add("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help=about)


def _demo(args: argparse.Namespace) -> None:
    """Train on the handwritten digits of scikit-learn, in seconds; no network needed."""
    from omnitrain.checkpoint.run_record import code_in
    from omnitrain.cli import demo

    with code_in(Path(omnitrain.__file__).parent):
        demo.digits(getattr(omnitrain, TRAINERS[args.trainer]), args.out)


def _add_train(commands: Any) -> None:
    train = _add_command(
        commands,
        "train",
        "Train the run that a file describes.",
        "Change its values: --trainer.learning_rate 1e-4 --trainer.callbacks.0.patience 3",
        usage="omnitrain train [CONFIG ...] [--resume RUN] [options] [--trainer.NAME VALUE ...]",
        add_help=False,
    )
    _add_configuration(train, "config.train")
    add = train.add_argument
    add("--resume", metavar="RUN", help="the run or checkpoint to resume, a folder or address; needs no CONFIG")
    add("--print_config", action="store_true", help="print the configuration with all changes, and train nothing")
    add(
        "--check", action="store_true", help="look for faults of data, model and loss, and train nothing; code 1 if any"
    )
    add("--plan", action="store_true", help="print steps, rates, memory, disk and time of the run, and train nothing")
    add("--json", dest="as_json", action="store_true", help="print the result of --check or --plan as JSON")
    about = "show this, with the arguments of the trainers, and exit"
    add("-h", "--help", action=_TrainHelp, nargs=0, default=argparse.SUPPRESS, help=about)


def _add_configuration(parser: argparse.ArgumentParser, function: str) -> None:
    """Have a command take configuration files and options with dots, as `words` of a function."""
    parser.epilog = "CONFIG is a YAML file, with or without -f or --config; later files override earlier ones."
    about = "import modules that are neither installed nor in the current folder: a configuration can run any code"
    parser.add_argument("--trust", action="store_true", help=about)
    parser.set_defaults(run=partial(_call, function), words=[])


class _TrainHelp(argparse.Action):
    """Prints the help with the arguments of the trainers."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from omnitrain.cli.config import format_trainer_help

        parser.print_help()
        print(f"\n{format_trainer_help()}", end="")
        parser.exit()


def _add_sweep(commands: Any) -> None:
    sweep = _add_command(
        commands,
        "sweep",
        "Train once for each of many values; the same command resumes an unfinished sweep.",
        "Example: omnitrain sweep a.yaml --trainer.learning_rate 1e-4,3e-4",
        usage="omnitrain sweep CONFIG ... --trainer.NAME A,B,C [--trainer.NAME '{low: A, high: B}'] [options]",
    )
    _add_configuration(sweep, "config.sweep")
    add = sweep.add_argument
    add("--trials", type=int, metavar="N", help="trials in all; may be left out if the values can be listed")
    add("--sampler", choices=("tpe", "random", "grid"), help="the sampler (default: grid if all fit in, else tpe)")
    add("--pruner", choices=("median", "none"), help="the pruner of bad trials (default: median)")
    add("--save_dir", type=Path, metavar="FOLDER", help="of the sweep (default: that of the configuration)")


def _add_config(commands: Any) -> None:
    about = "Check configuration files, convert those of nnScaler, and preview schedules."
    config = _add_command(commands, "config", about)
    actions = config.add_subparsers(title="commands", metavar="command", required=True)
    about = "Report all errors in a configuration, with file and line, without building anything."
    usage = "omnitrain config check CONFIG ... [options] [--trainer.NAME VALUE ...]"
    _add_configuration(_add_command(actions, "check", about, usage=usage), "config.check")
    convert = _add_command(actions, "convert", "Print a configuration of nnScaler's trainer as one of ours.")
    convert.add_argument("file", type=Path, metavar="FILE", help="the YAML file")
    convert.set_defaults(run=partial(_call, "config.convert"))
    _add_schedule(actions)


def _add_launch(commands: Any) -> None:
    usage = "omnitrain launch [-n N] [--fsdp | --zero {1,2,3}] [options] [-m] script [arguments of the script]"
    launch = _add_function(commands, _launch, usage=usage)
    add = launch.add_argument
    add("-n", dest="processes", type=int, default=1, metavar="N", help="processes per machine (default: 1)")
    way = launch.add_mutually_exclusive_group()
    way.add_argument("--fsdp", action="store_true", help="shard parameters, gradients and optimizer state with FSDP 2")
    way.add_argument("--zero", type=int, choices=(1, 2, 3), help="shard with DeepSpeed ZeRO, in this stage")
    add("--cpu", action="store_true", help="do not use GPUs; the default if there are none")
    about = "machines, or the fewest and the most of them; run the same command on each"
    add("--nnodes", dest="machines", default="1", metavar="N|MIN:MAX", help=about)
    add("--rdzv-endpoint", dest="endpoint", metavar="HOST:PORT", help="address of one of the machines, where all meet")
    add("--max-restarts", type=int, default=0, metavar="N", help="restart all processes if one dies, up to N times")
    add("-m", dest="is_module", action="store_true", help="run a module by its name, as with `python -m`")
    add("script", help="the script or module")
    add("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")


def _launch(args: argparse.Namespace) -> int:
    """Start a script that uses AccelerateTrainer on several processes, with or without GPUs.

    The exit code is that of the script.
    """
    from omnitrain.cli import launch

    options = {name: value for name, value in vars(args).items() if name != "run"}
    if args.script in ("train", "sweep") and not args.is_module and not Path(args.script).exists():  # commands of ours
        options |= {"is_module": True, "script": "omnitrain", "arguments": [args.script, *args.arguments]}
    return launch.start(launch.Launch(**options))


def _add_checkpoint(commands: Any) -> None:
    checkpoint = _add_command(commands, "checkpoint", "Inspect, verify, compare and export checkpoints.")
    actions = checkpoint.add_subparsers(title="commands", metavar="command", required=True)
    for name, (what, paths) in CHECKPOINT.items():
        action = _add_command(actions, name, what)
        for number, (metavar, about) in enumerate(paths.items()):
            kind = Path if metavar == "OUT" else _place
            action.add_argument(f"path{number}", type=kind, metavar=metavar, help=about)
        if name == "export":
            about = (
                "merge adapters into their base model, or add the weights that were not trained; BASE is the folder "
                "with the base model's weights, not needed if the checkpoint has them (save_frozen=True)"
            )
            action.add_argument("--merge", nargs="?", type=Path, const=True, default=False, metavar="BASE", help=about)
            action.add_argument("--adapter", metavar="NAME", help="which of several adapters to merge")
        if name == "show":
            action.add_argument("--json", action="store_true", dest="as_json", help="print it as JSON")
        action.set_defaults(run=_checkpoint, action=name)


def _place(text: str) -> Path | str:
    """Return a path, or the unchanged address of a remote store."""
    return text if "://" in text else Path(text)


def _checkpoint(args: argparse.Namespace) -> int | None:
    from omnitrain.checkpoint.lookup import local_copies
    from omnitrain.cli import checkpoint

    places = [value for name, value in vars(args).items() if name.startswith("path")]
    options = {name: getattr(args, name) for name in ("merge", "adapter", "as_json") if name in args}
    with local_copies(*places, whole=args.action != "ls") as paths:
        return getattr(checkpoint, args.action)(*paths, **options)


def _add_compare(commands: Any) -> None:
    compare = _add_function(commands, _compare)
    run = "the folder of a run, which has metrics.jsonl, or a file that MetricsDict.to_json has written"
    compare.add_argument("runs", nargs="+", metavar="RUN", help=run)
    compare.add_argument("--png", type=Path, metavar="FILE", help="an image to write, such as runs.png")


def _compare(args: argparse.Namespace) -> None:
    """Print the results of runs side by side, and draw their curves."""
    from omnitrain.cli.compare import compare_runs

    _print_and_draw(compare_runs(*args.runs), args.png)


def _print_and_draw(result: Any, image: Path | None) -> None:
    print(result)
    if image is not None:
        print(f"Drawn in {result.plot(image)}.")


def _add_check(commands: Any) -> None:
    check = _add_function(commands, _check)
    add = check.add_argument
    about = "samples of each set to read, at most (default: %(default)s)"
    add("--samples", type=int, default=10_000, metavar="N", help=about)
    about = "seconds to read each set, and to overfit a batch, at most (default: %(default)s)"
    add("--seconds", type=float, default=5.0, metavar="S", help=about)
    _add_processes(check)
    _add_script(check, timeout=600.0)


def _check(args: argparse.Namespace) -> int:
    """Look for faults of a script's data, model and loss before its first step.

    Nothing is trained: it ends at the first train(). Exit code 0: no error and no warning; 1: some; 2: it could not be
    tried.
    """
    return _rehearse("check", args, samples=args.samples, seconds=args.seconds)


def _add_plan(commands: Any) -> None:
    plan = _add_function(commands, _plan)
    about = "memory of each device of another machine, such as 80GB"
    plan.add_argument("--device", metavar="SIZE", help=about)
    plan.add_argument("--ranks", type=int, metavar="N", help="processes of the run, if it is to have others than here")
    _add_processes(plan)
    _add_script(plan, timeout=600.0)


def _plan(args: argparse.Namespace) -> int:
    """Print steps, learning rates, memory, disk and time of a script's run.

    Nothing is trained: it ends at the first train(). Exit code 0: it fits; 1: it does not; 2: it could not be tried.
    """
    return _rehearse("plan", args, device=args.device, ranks=args.ranks)


def _rehearse(call: str, args: argparse.Namespace, **options: Any) -> int:
    """Make a call of the first trainer that a script trains, with these options."""
    from omnitrain.diagnostics.script import Script

    script, function = Script(args.script, args.arguments, args.processes), "omnitrain.diagnostics.rehearsal.rehearse"
    with _untried_as_config_error():
        answer = script.call_trainer(function, args.timeout, call=call, options=options)
    text = f"{args.script}: {answer['trainer']}\n{answer['text']}"
    print(json.dumps(answer["result"], indent=2) if args.json else text)
    return 0 if answer["result"]["ok"] else 1


def _add_verify(commands: Any) -> None:
    verify = _add_function(commands, _verify)
    verify.add_argument("path", type=_place, metavar="RUN", help="the folder or address of a run, or of a checkpoint")
    about = "what makes the trainer, for its data, code and settings: a script with its arguments, or a YAML file"
    verify.add_argument("--data", nargs=argparse.REMAINDER, metavar="SCRIPT", default=[], help=about)
    _add_json(verify)


def _verify(args: argparse.Namespace) -> int:
    """Compare a run's files with their hashes, and its record with the code and data that are there.

    Exit code 0: nothing has changed; 1: something has; 2: it could not be compared.
    """
    from omnitrain.diagnostics import verify

    with _local_runs(args.path) as ((path,), (name,)):
        processes = verify.recorded_processes(path)
        description = verify.describe_script(args.data, processes) if args.data else None
        return _report(verify.verify_folder(path, description, name), args)


@contextlib.contextmanager
def _local_runs(*places: Path | str, whole: bool = True) -> Iterator[tuple[Sequence[Path], list[str]]]:
    """Yield local copies of runs that a proof compares, and the names of the runs."""
    from omnitrain.checkpoint.lookup import local_copies
    from omnitrain.core.secrets import mask_text

    with _untried_as_config_error(), local_copies(*places, whole=whole) as paths:
        yield paths, [mask_text(str(place)) for place in places]


def _add_parity(commands: Any) -> None:
    parity = _add_function(commands, _parity)
    parity.add_argument("--steps", type=int, default=20, metavar="N", help="how many steps (default: %(default)s)")
    backends = "some of native,accelerate,hf,ddp,fsdp,zero1,zero2,zero3,split (default: those that are installed)"
    parity.add_argument("--on", metavar="NAMES", help=backends)
    parity.add_argument("--picture", type=Path, metavar="FILE", help="an image to write, such as parity.png")
    _add_script(parity, timeout=600.0)


def _parity(args: argparse.Namespace) -> int:
    """Run the first steps of a script on each backend and in other splits of a step, and compare the numbers.

    Exit code 0: every difference is as expected; 1: one is not; 2: it could not be tried.
    """
    from omnitrain.diagnostics.parity import compare_backends
    from omnitrain.diagnostics.script import Script

    backends = None if args.on is None else [name.strip() for name in args.on.split(",") if name.strip()]
    with _untried_as_config_error():
        result = compare_backends(Script(args.script, args.arguments), args.steps, backends, args.timeout)
    return _report(result, args)


def _add_diff(commands: Any) -> None:
    diff = _add_function(commands, _diff)
    diff.add_argument("path0", type=_place, metavar="RUN_A", help="the folder or address of a run")
    diff.add_argument("path1", type=_place, metavar="RUN_B", help="another one")
    diff.add_argument("--picture", type=Path, metavar="FILE", help="an image of both losses to write, such as diff.png")
    _add_json(diff)


def _diff(args: argparse.Namespace) -> int:
    """Find the first step at which two runs part, and what parted first.

    Exit code 0: the runs are equal; 1: they part; 2: they could not be compared.
    """
    from omnitrain.diagnostics.run_diff import diff_runs

    with _local_runs(args.path0, args.path1, whole=False) as (paths, names):
        return _report(diff_runs(*paths, names=names), args)


def _add_replay(commands: Any) -> None:
    replay = _add_function(commands, _replay)
    add = replay.add_argument
    add("path", type=_place, metavar="RUN", help="the folder or address of a run")
    add("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    add("-n", dest="processes", type=int, metavar="N", help="processes (default: as many as the run had)")
    _add_script(replay, timeout=3600.0)


def _replay(args: argparse.Namespace) -> int:
    """Make one step of a run once more, to the bit, and print the loss and the gradient of each of its samples.

    Exit code 0: nothing disagrees with the run; 1: the digests of its trace do; 2: it could not be tried.
    """
    from omnitrain.diagnostics.replay import replay_script
    from omnitrain.diagnostics.script import Script
    from omnitrain.diagnostics.verify import recorded_processes

    with _local_runs(args.path) as ((path,), (name,)):
        processes = recorded_processes(path) if args.processes is None else args.processes
        script = Script(args.script, args.arguments, processes)
        return _report(replay_script(path, args.step, script, args.timeout, name), args)


@contextlib.contextmanager
def _untried_as_config_error() -> Iterator[None]:
    """Turn an error that keeps a proof from being tried into one of exit code 2."""
    try:
        yield
    except (OmnitrainError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _report(result: Any, args: argparse.Namespace) -> int:
    """Print the result of a proof, write its picture, and return its exit code."""
    print(json.dumps(result.to_json(), indent=2) if args.json else result)
    if "picture" in args and args.picture is not None:
        result.plot(args.picture)
    return result.code


def _add_schedule(commands: Any) -> None:
    schedule = _add_function(commands, _schedule)
    add = schedule.add_argument
    add("name", metavar="NAME", help="what `lr_scheduler` is called, such as cosine, multistep or wsd")
    add("options", nargs="*", metavar="OPTION=VALUE", help="`lr_scheduler_kwargs`, such as milestones=0.3dur,80ep")
    add("--epochs", type=float, metavar="N", help="the length of the run; this or one of the next two is needed")
    add("--max-steps", type=int, metavar="N", help="the same in steps")
    add("--max-duration", metavar="LENGTH", help="any other length, such as 3e6tok or 2h30m")
    add("--warmup", default="0", metavar="LENGTH", help="steps, a share such as 0.1, or a length such as 2ep")
    add("--learning-rate", type=float, default=1.0, metavar="RATE", help="that of the optimizer (default: %(default)s)")
    add("--steps-per-epoch", type=int, metavar="N", help="where something counts epochs")
    for unit, thing in (("samples", "samples"), ("tokens", "tokens"), ("seconds", "time")):
        add(f"--{unit}-per-step", type=float, metavar="N", help=f"where one of several units is {thing}")
    add("--rows", type=int, default=11, metavar="N", help="rows of the table (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="an image to write, such as rate.png")


def _schedule(args: argparse.Namespace) -> None:
    """Print the learning rates of a schedule over a run as a table, and draw them.

    Example: omnitrain config schedule wsd decay=0.2dur --max-duration 3e6tok --warmup 0.1dur
    """
    from omnitrain.optim.schedules import preview_schedule

    options = {}
    for word in args.options:
        name, is_pair, value = word.partition("=")
        if not is_pair:
            raise ConfigError(f"{word!r} is no option of a schedule. Write it as name=value.")
        options[name] = _parse_option(value)
    names = "epochs max_steps max_duration learning_rate steps_per_epoch samples_per_step tokens_per_step"
    preview = preview_schedule(
        args.name, lr_scheduler_kwargs=options, warmup_steps=_parse_option(args.warmup), rows=args.rows,
        seconds_per_step=args.seconds_per_step, **{name: getattr(args, name) for name in names.split()},
    )  # fmt: skip
    _print_and_draw(preview, args.plot)


def _add_script(parser: argparse.ArgumentParser, timeout: float) -> None:
    """Have a command run a script with its arguments, for so many seconds at most."""
    add = parser.add_argument
    about = "seconds for each run of the script (default: %(default).0f)"
    add("--timeout", type=float, default=timeout, metavar="SECONDS", help=about)
    _add_json(parser)
    add("script", metavar="SCRIPT", help="a script that trains, or a YAML file as for `omnitrain train`")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    about = "processes of the script (default: %(default)s)"
    parser.add_argument("-n", dest="processes", type=int, default=1, metavar="N", help=about)


def _add_drill(commands: Any) -> None:
    usage = "omnitrain drill [-n N] [--kills K] [--signals A,B] [--seed S] [options] SCRIPT [arguments of it]"
    drill = _add_function(commands, _drill, usage=usage)
    add = drill.add_argument
    add("--kills", type=int, default=5, metavar="K", help="interruptions (default: %(default)s)")
    about = "of kill, term, stop (a standstill) and disk (a full disk) (default: all)"
    add("--signals", default="kill,term,stop,disk", metavar="A,B", help=about)
    add("--seed", type=int, default=0, metavar="S", help="chooses the moments (default: %(default)s)")
    add("--picture", type=Path, metavar="FILE", help="an image of both curves to write, such as drill.svg")
    _add_processes(drill)
    _add_script(drill, timeout=3600.0)


def _drill(args: argparse.Namespace) -> int:
    """Kill and resume a script at random moments, and compare it with an undisturbed run.

    Exit code 0: equal to the bit, 1: not, 2: it could not be tried.
    """
    from omnitrain.diagnostics.drill import drill
    from omnitrain.diagnostics.script import Script

    def report(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    script = Script(args.script, args.arguments, args.processes)
    print(f"Running {args.script} to its end, undisturbed ...", file=sys.stderr, flush=True)
    with _untried_as_config_error():
        result = drill(script, args.kills, args.signals.split(","), args.seed, timeout=args.timeout, report=report)
    print(json.dumps(result.to_json()) if args.json else result.verdict())
    if args.picture is not None:
        path = result.plot(args.picture)
        report(f"Drawn in {path}.")
    return result.code


def _parse_option(text: str) -> Any:
    if "," in text:
        return [_parse_option(part) for part in text.split(",") if part]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


if __name__ == "__main__":
    raise SystemExit(main())
