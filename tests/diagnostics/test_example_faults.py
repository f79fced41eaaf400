"""Faults planted in copies of the examples, and what the commands report of them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import programs
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
HEAD = "from __future__ import annotations\n"
IMPORT = {HEAD: f"{HEAD}import faults\n"}
SHORT: dict[str, dict[str, str]] = {
    "images.py": {**IMPORT, "epochs: int = 12": "epochs: int = 4"},
    "causal_lm.py": {**IMPORT, "epochs: int = 3, size: int = 1600": "epochs: int = 3, size: int = 320"},
    "native_digits.yaml": {"epochs: 20": "epochs: 2"},
    "hf/text_classification.py": {
        **IMPORT, "num_train_epochs=4": "num_train_epochs=3", "train_batch_size=32": "train_batch_size=16",
        "hidden_size: int = field(default=64": "hidden_size: int = field(default=16", "default=2400": "default=240",
        "eval_samples: int = field(default=600": "eval_samples: int = field(default=48",
        "runs/hf/text_classification": "run",
        'save_strategy="epoch",': 'save_strategy="steps", save_steps=6, eval_strategy="epoch", use_cpu=True,',
    },
    "multi_gpu.py": {
        **IMPORT, "type=int, default=10": "type=int, default=3",
        'type=Path, default=Path("runs/multi_gpu")': 'type=Path, default=Path("run")',
    },
}  # fmt: skip
"""What makes each example short, and gives it the module of the faults."""
CHECK = "omnitrain check"
DRILL = "omnitrain drill --kills 1 --signals kill"
PARITY = "omnitrain parity --steps 3 --on ddp,split"
SPOILT = {"native_digits.yaml": 472}
"""The sample that the spikes come from, where it is not the seventh: here it comes once enough steps are known."""


class Row(NamedTuple):
    """A fault that is planted in an example, and what a command has to report.

    Attributes:
        script: The example.
        fault: What is planted.
        edits: The changes of its text.
        command: What comes before the name of the script; "python" runs the script itself.
        reports: Patterns, all of which the output has.
        code: The exit code.
    """

    script: str
    fault: str
    edits: dict[str, str]
    command: str
    reports: list[str]
    code: int = 1


LOG = 'log_steps="1ep",'
GUARD = f"{LOG} algorithms=[faults.SpikeGuard()], save_dir='run',"
NEW_WEIGHTS = r"since step \d+: it has other weights \(same batch, loss, learning rate, random state\)"
SPIKE = r"A spike: the (loss|gradient norm) of step \d+ \(epoch \d\) is \S+, above .* and leaves out its \d+ samples: "

IMAGES = [
    Row("images.py", "forgotten state", {LOG: f"{LOG} callbacks=[faults.GradientWarmup()],"}, DRILL,
        [NEW_WEIGHTS, r"suspect: callback GradientWarmup: its 'count' is 76 undisturbed, \d+ resumed"]),
    Row("images.py", "generator of a collator", {LOG: f"{LOG} data_collator=faults.Noise(),"}, DRILL,
        [r"since step \d+: it has another batch", "suspect: data_collator Noise: its 'generator'"]),
    Row("images.py", "BatchNorm", {}, PARITY,
        [r"on the split of a step: BatchNorm2d '0\.1', '1\.1' and others \(3 in all\) see the batch"], 0),
    Row("images.py", "BatchNorm", {}, CHECK, [r"note: mixing, BatchNorm2d '0\.1': in training"], 0),
    Row("images.py", "leak", {"images[1200:1500], labels[1200:1500]": "images[1100:1500], labels[1100:1500]"},
        CHECK, ["warning: overlap, the evaluation set: 100 of 400"]),
    Row("images.py", "spike", {LOG: GUARD, "Augmented(images[:1200]": "Augmented(faults.spoil(images[:1200])"},
        "python", [SPIKE], 0),
]  # fmt: skip

PACK = "DataCollatorWithFlattening(),"
CREATE = "    trainer = Trainer("
NORM = {CREATE: f"    model.model.norm = faults.ChannelNorm(64)\n{CREATE}"}
VALID = "    valid = ["
CAUSAL_LM = [
    Row("causal_lm.py", "forgotten state", {LOG: f"{LOG} callbacks=[faults.GradientWarmup()],"}, DRILL,
        [NEW_WEIGHTS, "suspect: callback GradientWarmup: its 'count' is 60 undisturbed"]),
    Row("causal_lm.py", "generator of a collator", {PACK: "faults.Noise(DataCollatorWithFlattening()),"}, DRILL,
        [r"since step \d+: it has another batch", "suspect: data_collator Noise: its 'generator'"]),
    Row("causal_lm.py", "BatchNorm", NORM, PARITY, [r"of a step: ChannelNorm 'model\.norm' sees the batch"], 0),
    Row("causal_lm.py", "BatchNorm", NORM, CHECK, [r"note: mixing, ChannelNorm 'model\.norm'"], 0),
    Row("causal_lm.py", "padding that is attended to", {PACK: "faults.pad_left,"}, CHECK,
        [r"warning: padding, sample \d+ of the training set: its outputs change by [\d.]+% of their distance"]),
    Row("causal_lm.py", "padding that is attended to", {PACK: "faults.pad_left,"}, PARITY,
        ["padding changes the loss"], 0),
    Row("causal_lm.py", "padding with labels", {PACK: "faults.pad_right,"}, CHECK,
        [r"warning: padding, sample \d+ of the training set: its loss changes from"]),
    Row("causal_lm.py", "padding with labels", {PACK: "faults.pad_right,"}, PARITY, ["padding changes the loss"], 0),
    Row("causal_lm.py", "leak", {CREATE: f"    valid += train[:50]\n{CREATE}"}, CHECK,
        ["warning: overlap, the evaluation set: 49 of 149 different samples"]),
    Row("causal_lm.py", "spike",
        {LOG: GUARD, VALID: f"    train[7]['input_ids'] = train[7]['input_ids'][::-1] * 20\n{VALID}"},
        "python", [SPIKE], 0),
]  # fmt: skip

STEPS = "log_steps: 50"
MODEL, DATA = "class_path: examples.native_digits.DigitReader", "class_path: examples.native_digits.load_part"
TRAIN = f"{DATA}\n    init_args: {{part: train}}"
READER = {MODEL: "class_path: faults.make_normalized_reader"}
YAML = [
    Row("native_digits.yaml", "forgotten state",
        {STEPS: f"{STEPS}\n  callbacks: [{{class_path: faults.GradientWarmup}}]"}, DRILL,
        [NEW_WEIGHTS, "suspect: callback GradientWarmup: its 'count' is 76 undisturbed"]),
    Row("native_digits.yaml", "generator of a collator",
        {STEPS: f"{STEPS}\n  data_collator: {{class_path: faults.Noise}}"}, DRILL,
        [r"since step \d+: it has another batch", "suspect: data_collator Noise: its 'generator'"]),
    Row("native_digits.yaml", "BatchNorm", READER, PARITY, [r"BatchNorm2d 'edges\.1' sees the batch"], 0),
    Row("native_digits.yaml", "BatchNorm", READER, CHECK,
        [r"note: mixing, BatchNorm2d 'edges\.1'"], 0),
    Row("native_digits.yaml", "leak", {TRAIN: "class_path: faults.load_leaking"}, CHECK,
        ["warning: overlap, the evaluation set: 20 of 300 different samples"]),
    Row("native_digits.yaml", "spike", {TRAIN: "class_path: faults.load_spoilt",
        STEPS: f"{STEPS}\n  algorithms: [{{class_path: SpikeGuard}}]"},
        "omnitrain train", [SPIKE], 0),
]  # fmt: skip

TOKENIZER = "        processing_class=tokenizer,\n"
BUILD, MAIN, MAPPED = "    trainer = Trainer(\n", "def main() -> None:\n", "    def tokenized("
DECAY = """class HeadDecay(faults.TrainerCallback):
    count = 0

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.count += 1
        model.classifier.weight.data.mul_(1 - 1 / (20 + self.count))


"""
BATCH_NORM = {MAPPED: f"    model.dropout = faults.nn.Sequential(faults.nn.BatchNorm1d(16), model.dropout)\n{MAPPED}"}
UNMASKED = {TOKENIZER: f"{TOKENIZER}        data_collator=faults.Unmasked(tokenizer),\n"}
SHUFFLE = "    chance.shuffle(rows)\n"
TEXT = [
    Row("hf/text_classification.py", "forgotten state",
        {TOKENIZER: f"{TOKENIZER}        callbacks=[faults.GradientWarmup()],\n"}, DRILL,
        [NEW_WEIGHTS, "suspect: callback GradientWarmup: its 'count' is 45 undisturbed"]),
    Row("hf/text_classification.py", "forgotten state of transformers",
        {TOKENIZER: f"{TOKENIZER}        callbacks=[HeadDecay()],\n", MAIN: DECAY + MAIN}, DRILL,
        [r"since step \d+: it has another loss \(same batch, learning rate, random state\)",
         "suspect: TrainerCallback HeadDecay: its 'count' is 45 undisturbed, .* have it inherit .*ExportableState"]),
    Row("hf/text_classification.py", "generator of a collator",
        {TOKENIZER: f"{TOKENIZER}        data_collator=faults.Noise(faults.DataCollatorWithPadding(tokenizer)),\n"},
        DRILL, [r"since step \d+: it has another batch", "suspect: data_collator Noise: its 'generator'"]),
    Row("hf/text_classification.py", "BatchNorm", BATCH_NORM, PARITY, [r"BatchNorm1d 'dropout\.0' sees the batch"], 0),
    Row("hf/text_classification.py", "BatchNorm", BATCH_NORM, CHECK, [r"note: mixing, BatchNorm1d 'dropout\.0'"], 0),
    Row("hf/text_classification.py", "padding that is attended to", UNMASKED, CHECK,
        [r"warning: padding, sample \d+ of the training set: its outputs change by [\d.]+% of their distance"]),
    Row("hf/text_classification.py", "padding that is attended to", UNMASKED, PARITY,
        ["padding changes the loss", "Dropout .* draw random numbers per batch"], 0),
    Row("hf/text_classification.py", "leak", {"rows[sum(sizes[:i]) :": "rows[max(0, sum(sizes[:i]) - 20) :"}, CHECK,
        ["warning: overlap, the evaluation set: 20 of 68 different samples"]),
    Row("hf/text_classification.py", "spike",
        {TOKENIZER: f"{TOKENIZER}        algorithms=[faults.SpikeGuard(window=20)],\n"
         "        compute_loss_func=faults.weighted_loss,\n",
         SHUFFLE: f"{SHUFFLE}    rows[7][\"label\"] = faults.HEAVY\n"}, "python", [SPIKE], 0),
]  # fmt: skip

SPLIT = "    train, valid, test = map(digits, range(3))\n"
RELU = "nn.Linear(64, 128), nn.ReLU()"
LAUNCH = "omnitrain launch -n 2 --cpu"
MULTI_GPU = [
    Row("multi_gpu.py", "forgotten state", {LOG: f"{LOG} callbacks=[faults.GradientWarmup()],"}, f"{DRILL} -n 2",
        [NEW_WEIGHTS, "suspect: callback GradientWarmup: its 'count' is 57 undisturbed"]),
    Row("multi_gpu.py", "forgotten state on one rank",
        {LOG: f"{LOG} callbacks=[faults.RankNoise()],"}, f"{DRILL} -n 2",
        [r"since step \d+: it has another random state \(.*\), on rank 1",
         "suspect: callback RankNoise of rank 1: its 'count'"]),
    Row("multi_gpu.py", "generator of a collator", {LOG: f"{LOG} data_collator=faults.Noise(),"}, f"{DRILL} -n 2",
        [r"since step \d+: it has another batch", "suspect: data_collator Noise: its 'generator'"]),
    Row("multi_gpu.py", "BatchNorm", {RELU: "nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()"}, PARITY,
        ["of a step: BatchNorm1d '1' sees the batch"], 0),
    Row("multi_gpu.py", "BatchNorm", {RELU: "nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()"}, f"{CHECK} -n 2",
        ["note: mixing, BatchNorm1d '1': in training"], 0),
    Row("multi_gpu.py", "leak", {"manual_seed(0))[part]": "manual_seed(part))[part]"}, f"{CHECK} -n 2",
        ["warning: overlap, the evaluation set: 191 of 297 different samples"]),
    Row("multi_gpu.py", "spike",
        {LOG: f"{LOG} algorithms=[faults.SpikeGuard()],",
         SPLIT: f"{SPLIT}    faults.mislabel(train.dataset.tensors, train.indices[7])\n"}, LAUNCH, [SPIKE], 0),
]  # fmt: skip

ROWS = [*IMAGES, *CAUSAL_LM, *YAML, *TEXT, *MULTI_GPU]

TRACE = {
    "images.py": {LOG: f"{LOG} callbacks=[faults.Trace()], save_dir='run',"},
    "causal_lm.py": {LOG: f"{LOG} callbacks=[faults.Trace()], save_dir='run',"},
    "native_digits.yaml": {STEPS: f"{STEPS}\n  callbacks: [{{class_path: Trace}}]", "runs/native_digits": "run"},
    "hf/text_classification.py": {
        TOKENIZER: f"{TOKENIZER}        callbacks=[faults.Trace()],\n",
        "warmup_steps=0.1": "warmup_steps=0",
    },
    "multi_gpu.py": {LOG: f"{LOG} callbacks=[faults.Trace()],"},
}
"""How a script gets a trace, and a folder."""
SEED = "    torch.manual_seed(0)"
NUDGED: dict[str, dict[str, dict[str, str]]] = {
    "images.py": {
        "seed": {"epochs=epochs,": "epochs=epochs, seed=1,"}, "rate": {"rate=1e-2": "rate=1.1e-2"},
        "sample": {SEED: f"    images[7] += 1e-3\n{SEED}"}, "labels": {SEED: f"    labels[:] = 3\n{SEED}"},
        "source": {"nn.ReLU()": "nn.GELU()"},
    },
    "causal_lm.py": {
        "seed": {"epochs=epochs,": "epochs=epochs, seed=1,"}, "rate": {"rate=5e-3": "rate=5.1e-3"},
        "sample": {SEED: f"    train[7]['input_ids'][3] = 5\n{SEED}"},
        "labels": {SEED: f"    train = [{{'input_ids': sample['input_ids'][::-1]}} for sample in train]\n{SEED}"},
        "source": {PACK: "lambda samples: DataCollatorWithFlattening()(samples),"},
    },
    "native_digits.yaml": {
        "seed": {"epochs: 2": "epochs: 2\n  seed: 1"}, "rate": {"learning_rate: 3e-3": "learning_rate: 3.1e-3"},
        "sample": {TRAIN: "class_path: faults.load_nudged"}, "labels": {TRAIN: "class_path: faults.load_relabelled"},
        "source": {MODEL: "class_path: faults.make_normalized_reader"},
    },
    "hf/text_classification.py": {
        "seed": {"logging_steps=50": "logging_steps=50, seed=1"}, "rate": {"rate=2e-3": "rate=2.1e-3"},
        "sample": {BUILD: f"    train = train.map(faults.replace_token, with_indices=True)\n{BUILD}"},
        "labels": {BUILD: f"    train = train.map(lambda row: {{'label': 3}})\n{BUILD}"},
        "source": {"evaluation.label_ids).mean()": "evaluation.label_ids).sum()"},
    },
    "multi_gpu.py": {
        "seed": {"epochs=epochs,": "epochs=epochs, seed=1,"}, "rate": {"rate=3e-3": "rate=3.1e-3"},
        "sample": {SPLIT: f"{SPLIT}    train.dataset.tensors[0][train.indices[7]] += 1e-3\n"},
        "labels": {SPLIT: f"{SPLIT}    train.dataset.tensors[1][:] = 3\n"},
        "source": {RELU: RELU.replace("ReLU", "GELU")},
    },
}  # fmt: skip
"""How each script gets another seed, rate, sample, labels and code."""
PARTED = {
    "seed": "they part at once step 1: other samples",
    "sample": r"step \d+: same samples, other batch \(and ",
    "rate": "step [12]: same samples, same batch, .*, same loss, same gradients, other update",
}
CHANGED = {
    "labels": "changed data train_dataset: sample",
    "source": r"changed code (model|data_collator|compute_metrics)",
}


def plant(row: Row, folder: Path) -> str:
    """Copy an example with its changes into a folder, and return its name there."""
    text = (EXAMPLES / row.script).read_text(encoding="utf-8")
    for old, new in {**SHORT[row.script], **row.edits}.items():
        assert text.count(old) == 1, f"{row.script} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    path = folder / Path(row.script).name
    path.write_text(text, encoding="utf-8")
    shutil.copy(FOLDER / "faults.py", folder)
    if path.suffix == ".yaml":  # which names functions of a module
        (folder / "examples").mkdir()
        shutil.copy(EXAMPLES / f"{path.stem}.py", folder / "examples")
    return path.name


def run(command: str, script: str, folder: Path, code: int | None = 0) -> str:
    """Run a command with a script in a folder, and return what it prints as one line."""
    program, *words = f"{command} {script}".split()
    words = words if program == "python" else ["-m", program, *words]
    environment = programs.launch_environment(
        OMP_NUM_THREADS="1", COLUMNS="200", ACCELERATE_USE_CPU="true", TMPDIR=str(folder)
    )  # fmt: skip
    done = programs.run(sys.executable, *words, cwd=folder, env=environment, timeout=900)
    output = done.stdout + done.stderr
    assert done.returncode == code, f"{command} {script}: exit code {done.returncode}\n{output}"
    assert "Traceback" not in output, output
    return " ".join(output.split())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.script}, {row.fault}, {row.command}")
def test_fault_in_example_is_reported(row: Row, tmp_path: Path) -> None:
    output = run(row.command, plant(row, tmp_path), tmp_path, row.code)
    for pattern in row.reports:
        assert re.search(pattern, output), f"{pattern!r} is not in: {output}"
    if row.fault == "spike":  # each of the steps that are left out has the sample
        (record,) = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
        spikes = record["starts"][-1]["left_out"]
        assert spikes and all(SPOILT.get(row.script, 7) in spike["samples"] for spike in spikes)
        newest = max(tmp_path.rglob("omnitrain.json"), key=lambda path: path.stat().st_mtime)
        assert f'"left_out_samples": {sum(len(spike["samples"]) for spike in spikes)}' in newest.read_text()


@pytest.mark.parametrize("script", TRACE)
def test_runs_of_example_are_proved(script: str, tmp_path: Path) -> None:
    """Equal if nothing has changed, and what parts first otherwise; a step is repeated; the plan is kept to."""
    program = {"native_digits.yaml": "omnitrain train", "multi_gpu.py": LAUNCH}.get(script, "python")
    for name, edits in {"a": {}, "b": {}, **NUDGED[script]}.items():
        folder = tmp_path / name
        plant(Row(script, name, {**TRACE[script], **edits}, program, []), folder)
        if name not in CHANGED:
            run(program, Path(script).name, folder)
    steps = len((tmp_path / "a/run/trace.jsonl").read_text().splitlines())
    assert f"equal to step {steps}" in run("omnitrain diff a/run", "b/run", tmp_path)
    for name, text in PARTED.items():
        assert re.search(text, run("omnitrain diff a/run", f"{name}/run", tmp_path, 1)), name
    script, processes = Path(script).name, " -n 2" * (program == LAUNCH)
    replayed = run(f"omnitrain replay run --step {steps - 5}", script, tmp_path / "a")
    assert "to the bit: samples, batch, weights, random, loss, gradients, update" in replayed
    assert re.search("Nothing .*has changed", run("omnitrain verify run --data", script, tmp_path / "a"))
    for name, text in CHANGED.items():
        assert re.search(text, run("omnitrain verify ../a/run --data", script, tmp_path / name, 1)), name
    plan = json.loads(run(f"omnitrain plan --json{processes}", script, tmp_path / "a"))
    events = (tmp_path / "a/run/metrics.jsonl").read_text()
    checkpoints = [path for path in (tmp_path / "a/run").glob("checkpoint-*") if not path.is_symlink()]
    sizes = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in checkpoints]
    assert plan["length"]["steps"] == steps and plan["counts"]["evaluations"] == events.count('"kind": "eval"')
    assert len(sizes) <= plan["disk"]["kept"] and sum(sizes) <= 1.05 * plan["disk"]["total"]
    assert plan["disk"]["checkpoint"] == pytest.approx(max(sizes), rel=0.1)
