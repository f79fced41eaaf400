"""Verification of the files of a run, and of its record."""

from __future__ import annotations

import hashlib
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import filesize

from omnitrain.checkpoint.lookup import check_content, find_checkpoints
from omnitrain.checkpoint.manifest import read_manifest
from omnitrain.checkpoint.run_record import RUN_FILE, package_versions, read_record, read_starts
from omnitrain.core.display import ProofResult
from omnitrain.core.errors import CheckpointError, ConfigError, escape_unprintable
from omnitrain.core.files import open_regular
from omnitrain.diagnostics.script import Script

if TYPE_CHECKING:
    from omnitrain.trainer.base import BaseTrainer

State = Literal["same", "changed", "gone"]

# The settings that do not describe what is computed, or are compared with the data.
_UNCOMPARED = {"device", "save_dir", "samples_per_epoch", "loggers"}
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint compared with their hashes.

    Attributes:
        folder: Its folder.
        files: Its files, `omnitrain.json` included.
        bytes: Their bytes.
        problems: A text for each file that is missing or damaged.
        content: Its `omnitrain.json`; empty if that is damaged.
    """

    folder: Path
    files: int
    bytes: int
    problems: list[str]
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A part of a run's record compared with the present.

    Attributes:
        kind: "package", "script", "data", "code" or "setting".
        name: The name of the part, such as "torch" or "train_dataset".
        state: "same", "changed", or "gone" if the part no longer exists.
        before: The recorded value.
        after: The present value; None if it is gone.
        text: The difference as text, where the two values do not show it, or how much was compared.
        is_partial: Whether only a part of it was compared.
    """

    kind: str
    name: str
    state: State
    before: Any = None
    after: Any = None
    text: str = ""
    is_partial: bool = False

    def __str__(self) -> str:
        """Return the part with its recorded and its present value."""
        before, after = (reprlib.repr(value) for value in (self.before, self.after))
        values = f"was {before}" if self.state == "gone" else f"was {before}, is {after}"
        return f"{self.state:<8} {self.kind} {self.name}: {self.text or values}"


@dataclass(frozen=True, slots=True)
class RunVerification(ProofResult):
    """The files of a run and its record, compared with the present; prints as lines.

    Attributes:
        run: The run or checkpoint, as it was given.
        checkpoints: Its checkpoints by step, and which of their files are missing or damaged.
        findings: The parts of the record, each "same", "changed" or "gone".
        uncompared: What could not be compared, with the reason.
    """

    run: str
    checkpoints: list[CheckpointFiles]
    findings: list[Finding]
    uncompared: list[str]

    @property
    def ok(self) -> bool:
        """Whether every file is as it was written, and nothing that was compared has changed or is gone."""
        is_complete = not any(checkpoint.problems for checkpoint in self.checkpoints)
        return is_complete and all(finding.state == "same" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        checkpoints = [
            {
                "folder": checkpoint.folder.name,
                "files": checkpoint.files,
                "bytes": checkpoint.bytes,
                "problems": checkpoint.problems,
            }
            for checkpoint in self.checkpoints
        ]
        findings = [asdict(finding) for finding in self.findings]
        return {
            "ok": self.ok, "run": self.run, "checkpoints": checkpoints, "findings": findings,
            "uncompared": self.uncompared,
        }  # fmt: skip

    def __str__(self) -> str:
        """Return the verdict on the files and the record, as lines."""
        damaged = [checkpoint for checkpoint in self.checkpoints if checkpoint.problems]
        total = sum(checkpoint.files for checkpoint in self.checkpoints)
        size = filesize.decimal(sum(checkpoint.bytes for checkpoint in self.checkpoints))
        verdict = f"{len(damaged)} damaged" if damaged else "every file as it was written"
        count = f"{len(self.checkpoints)} checkpoint{'s' * (len(self.checkpoints) != 1)}"
        lines = [f"{self.run}: {count}, {total} files, {size}: {verdict}"]
        lines += [
            f"damaged  {checkpoint.folder.name}: {text}" for checkpoint in damaged for text in checkpoint.problems
        ]
        by_kind: dict[str, list[str]] = {}
        for finding in self.findings:
            if finding.state == "same":
                by_kind.setdefault(finding.kind, []).append(finding.name + f" ({finding.text})" * bool(finding.text))
        lines += [f"same     {kind} {', '.join(names)}" for kind, names in by_kind.items()]
        lines += [str(finding) for finding in self.findings if finding.state != "same"]
        lines += [f"unknown  {reason}" for reason in self.uncompared]
        is_partial = self.uncompared or any(finding.is_partial for finding in self.findings)
        subject = "Nothing that was compared" if is_partial else "Nothing"
        lines.append(f"{subject} has changed." if self.ok else "This is not what was recorded.")
        return "\n".join(map(escape_unprintable, lines))


def verify_folder(path: Path, description: Mapping[str, Any] | None = None, name: str | None = None) -> RunVerification:
    """Compare the files of a run with their hashes, and what it was made of with the present.

    Args:
        path: The folder of a run, or of one of its checkpoints.
        description: What `describe_trainer` returns for the present trainer.
        name: What the result calls the run; None is the path.

    Raises:
        ConfigError: If it is no folder of a run.
    """
    findings, uncompared = list[Finding](), list[str]()
    starts: list[dict[str, Any]] = []
    try:
        starts = read_starts(path / RUN_FILE) if path.is_dir() else []
    except CheckpointError as error:
        findings.append(Finding("record", RUN_FILE, "changed", "the starts of a run", str(error)))
    try:
        checkpoints = verify_files(path)
    except ConfigError:
        if not starts:
            raise
        checkpoints = []
        uncompared.append("files, as the run has saved no checkpoint yet")
    content = next((entry.content for entry in reversed(checkpoints) if entry.content), {})
    record = starts[-1] if starts else content.get("record") or {}
    if not record:
        uncompared.append(f"packages and script, as there is no {RUN_FILE}")
    packages: Mapping[str, str] = record.get("packages") or {}
    present = package_versions()
    findings += _compare("package", packages, {name: present[name] for name in packages if name in present})
    findings += _compare_script(record, uncompared)
    if description is None:
        uncompared.append(
            "data, code and settings. Give the script or the YAML file that makes the trainer: --data SCRIPT"
        )
    else:
        identity = content.get("identity") or {"data": {}, "code": record.get("code") or {}}
        summaries = {} if content.get("identity") else record.get("data") or {}
        findings += _compare_data(identity["data"], summaries, description, uncompared)
        findings += _compare_code(identity, description["identity"], uncompared)
        findings += _compare_settings(content.get("settings") or record.get("settings") or {}, description["settings"])
    return RunVerification(name or str(path), checkpoints, findings, uncompared)


def describe_script(words: Sequence[str], processes: int) -> dict[str, Any]:
    """Return what `describe_trainer` returns for the first trainer that a script trains, in a process of its own.

    Args:
        words: The script, or a YAML file as for `omnitrain train`, and its arguments.
        processes: How many processes run it: as many as the run had, as settings depend on it.

    Raises:
        ConfigError: If the script does not train.
    """
    return Script(words[0], words[1:], processes).call_trainer(f"{__name__}.{describe_trainer.__name__}")


def recorded_processes(path: Path) -> int:
    """Return on how many processes a run was last started; 1 if unknown."""
    processes = read_record(path).get("processes")
    return processes if isinstance(processes, int) and processes > 0 else 1


# --- files


def verify_files(path: Path) -> list[CheckpointFiles]:
    """Return the comparison of every file of a run, or of one checkpoint, with its hash.

    The files of all checkpoints are hashed in a few threads, as hashlib releases the GIL.

    Raises:
        ConfigError: If there is no checkpoint.
    """
    _, folders = find_checkpoints(path)
    contents, problems = dict[Path, dict[str, Any]](), dict[Path, list[str]]()
    for folder in folders:
        contents[folder], problems[folder] = {}, []
        try:
            contents[folder] = read_manifest(folder)
        except CheckpointError as error:
            problems[folder].append(str(error))
    files = [(folder, name, entry) for folder in folders for name, entry in contents[folder].get("files", {}).items()]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for (folder, *_), problem in zip(files, pool.map(_find_problem, files), strict=True):
            problems[folder] += [problem] if problem else []
    verified = []
    for folder in folders:
        content, texts = contents[folder], problems[folder]
        if content and not texts:
            try:
                check_content(folder, content)
            except CheckpointError as error:
                texts.append(str(error))
        entries: Mapping[str, Any] = content.get("files", {})
        size = sum(entry["size"] for entry in entries.values())
        # one that the run has deleted meanwhile is none of its checkpoints any more
        if folder.is_dir():
            verified.append(CheckpointFiles(folder, len(entries) + 1, size, texts, content))
    return verified


def _find_problem(file: tuple[Path, str, Mapping[str, Any]]) -> str:
    """Return what is wrong with a file of a checkpoint, or ""."""
    folder, name, entry = file
    try:
        status = (folder / name).stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name!r} is not a regular file"
        if status.st_size != entry["size"]:
            return f"{name!r} has {status.st_size} bytes, and {entry['size']} were written"
        with open_regular(folder / name) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    except FileNotFoundError:
        return f"{name!r} is missing"
    except (OSError, ValueError) as error:
        return f"{name!r} cannot be read: {error}"
    return "" if digest == entry["sha256"] else f"the content of {name!r} does not match its sha256"


# --- the record


def describe_trainer(trainer: BaseTrainer) -> dict[str, Any]:
    """Return the digests of data and code of a trainer, and its settings, as JSON types."""
    from omnitrain.checkpoint.fingerprints import fingerprint_run

    identity = fingerprint_run(trainer.settings, trainer._sets, trainer.model)
    return {"identity": identity, "settings": trainer.resolved_config()}


def _compare(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each recorded value, and for each that exists only now."""
    findings = [_finding(kind, name, value, after.get(name, _ABSENT)) for name, value in before.items()]
    added = [name for name in after if name not in before]
    return findings + [Finding(kind, name, "changed", None, after[name]) for name in added]


def _finding(kind: str, name: str, before: Any, after: Any) -> Finding:
    if after is _ABSENT:
        return Finding(kind, name, "gone", before)
    return Finding(kind, name, "same" if before == after else "changed", before, after)


def _compare_script(record: Mapping[str, Any], uncompared: list[str]) -> list[Finding]:
    """Compare the script that the run was started with, if it is where the command of the run says."""
    script = record.get("script") or {}
    if not script.get("sha256"):
        return []
    words = [os.path.expanduser(word) for word in record.get("command") or []]
    path = next((Path(word) for word in words if Path(word).name == script["name"]), Path(script["name"]))
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        if not path.is_absolute():  # as recorded, from the folder of the run's command
            uncompared.append(f"script {str(path)!r}, which is not in this folder")
            return []
        return [Finding("script", str(path), "gone", script["sha256"][:16])]
    return [_finding("script", str(path), script["sha256"][:16], digest[:16])]


def _compare_data(
    data: Mapping[str, Any], summaries: Mapping[str, Any], description: Mapping[str, Any], uncompared: list[str]
) -> Iterator[Finding]:
    """Compare the samples of each set that both have by index, or the digests of a run without checkpoints."""
    from omnitrain.checkpoint.fingerprints import changed_data, summarize_data

    current: Mapping[str, Any] = description["identity"]["data"]
    digests = summarize_data(current)
    for argument, recorded in (data or summaries).items():
        for key, before in recorded.items():
            name = f"{argument}[{key!r}]" if key else argument
            after = current.get(argument, {}).get(key, _ABSENT)
            if before is None or after is None:
                uncompared.append(f"{name}, whose samples have no index")
            elif after is _ABSENT:
                yield Finding("data", name, "gone", {"size": before["size"]})
            elif not data:
                yield _finding("data", name, before, digests[argument][key])
            else:
                text = changed_data("it", before, after)
                compared = sum(
                    bool(parts.keys() & after["samples"].get(index, {}).keys())
                    for index, parts in before["samples"].items()
                )
                if not text and not compared and before["size"]:
                    uncompared.append(f"{name}, whose samples have no content with a digest: only its size is the same")
                    continue
                state: State = "changed" if text else "same"
                text = text or f"{compared} of {before['size']} samples compared"
                is_partial = compared < before["size"]
                yield Finding("data", name, state, {"size": before["size"]}, {"size": after["size"]}, text, is_partial)
    for argument, sets in current.items() if data else ():
        for key in sets.keys() - data.get(argument, {}).keys():
            name = f"{argument}[{key!r}]" if key else argument
            yield Finding("data", name, "changed", None, digests[argument][key], "the run did not have it")


def _compare_code(recorded: Mapping[str, Any], current: Mapping[str, Any], uncompared: list[str]) -> list[Finding]:
    if recorded.get("python", current["python"]) != current["python"]:
        uncompared.append(f"code, as its digests are those of Python {recorded['python']}")
        return []
    sides = [
        {f"{name}.{part}" if part else name: digest for name, parts in code.items() for part, digest in parts.items()}
        for code in (recorded["code"], current["code"])
    ]
    return _compare("code", *sides)


def _compare_settings(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[Finding]:
    from omnitrain.checkpoint.setting_changes import DECIDING, changed_settings

    if not recorded:
        return []
    changed = changed_settings(recorded, current)
    plain = {
        name: (value, current.get(name, _ABSENT))
        for name, value in recorded.items()
        if name not in DECIDING and name not in _UNCOMPARED and current.get(name, _ABSENT) != value
    }
    findings = [_finding("setting", name, *values) for name, values in {**changed, **plain}.items()]
    count = len(recorded) - len(_UNCOMPARED & recorded.keys()) - len(findings)
    return [Finding("setting", f"{count} of {count + len(findings)}", "same"), *findings]
