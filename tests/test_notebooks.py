"""The notebooks run from top to bottom in a kernel of their own, and show what they keep as their outputs.

python tests/test_notebooks.py                             executes all notebooks and writes their outputs anew
python tests/test_notebooks.py notebooks/quickstart.ipynb  one of them

Words, counts and numbers are compared; of images, that they are there. What a run prints while it trains is kept, but
not compared. Warnings (stderr) are not kept: they are about the machine.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from outputs import LOG_LINE, is_same_output, without_progress

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT = 300  # seconds for a cell; each notebook takes less than a minute
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(notebook: NotebookNode) -> NotebookNode:
    """Execute a notebook in an empty folder, on the CPU with one thread, and leave what is worth keeping."""
    # What tests/conftest.py sets would keep figures out of a notebook, and print a line into it.
    environment = {name: os.environ[name] for name in os.environ.keys() - {"MPLBACKEND", "WANDB_MODE"}}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.realpath(folder)
        client = NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": place}})
        client.execute(env=environment)
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(code_cells(notebook), start=1):
        cell.metadata, cell.execution_count = {}, number
        cell.outputs = without_noise(cell.outputs, place)
    return notebook


def without_noise(outputs: list[NotebookNode], place: str) -> list[NotebookNode]:
    """Return outputs with each run of printed texts as one, without warnings and the folder that it ran in."""
    result: list[NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            result.append(output)
        elif output.name == "stdout":
            if not result or result[-1].output_type != "stream":
                result.append(nbformat.v4.new_output("stream", name="stdout", text=""))
            result[-1].text += output.text
    for output in result:
        if output.output_type == "stream":
            output.text = LOG_LINE.sub("", output.text).replace(place + os.sep, "")
    return [output for output in result if output.get("text") != ""]


def difference(stored: NotebookNode, fresh: NotebookNode) -> str:
    """Return what two executions of a cell differ in, or nothing."""
    ours, theirs = ([_summary(output) for output in cell.outputs] for cell in (stored, fresh))
    kinds, other_kinds = ([kind for kind, _ in outputs] for outputs in (ours, theirs))
    if kinds != other_kinds:
        return f"The outputs of {stored['id']} are {other_kinds} instead of {kinds}."
    for (_, text), (_, other) in zip(ours, theirs, strict=True):
        if not is_same_output(text, other):
            return f"{stored['id']} prints:\n{other}"
    return ""


def _summary(output: NotebookNode) -> tuple[str, str]:
    """Return what kind of output it is, images included, and its text."""
    if output.output_type == "stream":
        return output.name, without_progress(output.text)
    data = output.get("data", {})
    return " ".join([output.output_type, *sorted(data)]), without_progress(data.get("text/plain", ""))


@every_notebook
def test_notebook_keeps_outputs_only(path: Path) -> None:
    """If not: `make notebooks-write` executes and writes it."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    assert not [cell["id"] for cell in notebook.cells if cell.metadata]
    assert [cell["id"] for cell in notebook.cells] == [f"cell-{number:02}" for number in range(len(notebook.cells))]
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    printed = json.dumps([cell.outputs for cell in cells])
    assert not [place for place in (str(ROOT), tempfile.gettempdir(), str(Path.home()) + "/") if place in printed]
    assert path.stat().st_size < 200_000


@pytest.mark.slow  # a minute for all; `make notebooks` runs it too
@every_notebook
def test_notebook_shows_kept_outputs(path: Path) -> None:
    notebook = read(path)
    cells = zip(code_cells(notebook), code_cells(executed(notebook)), strict=True)
    differences = [difference(stored, fresh) for stored, fresh in cells]
    assert not any(differences), "\n".join(filter(None, differences))


@pytest.mark.slow
@pytest.mark.processes
def test_execution_keeps_display() -> None:
    """The bar, the curve and the table are drawn in one place per run, escaped, and none is lost by another run."""
    sources = [
        "import torch\nfrom omnitrain import Callback, Trainer\n"
        "class Report(Callback):\n"
        "    def on_epoch_end(self, trainer):\n"
        "        trainer.lifecycle.report({'<b>note</b>': 'a text'})\n"
        "x = torch.ones(8, 2)\n"
        "trainer = Trainer(torch.nn.Linear(2, 1), (x, x[:, :1]), (x, x[:, :1]), loss_fn=torch.nn.MSELoss(), "
        "batch_size=2, epochs=2, log_steps=1, device='cpu', callbacks=[Report()])\n"
        "metrics = trainer.train()",
        "metrics = trainer.train(more=1)\nmetrics = trainer.train()",
        "display(trainer, metrics, metrics.plot())",
        "scores = trainer.test((x, x[:, :1]))",
        "%%capture caught\nmetrics = trainer.train()",
        "print('captured', caught.stdout)",
    ]
    notebook = executed(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]))
    first, second, third, test, captured, fresh = code_cells(notebook)
    kinds = [[_summary(output)[0] for output in cell.outputs] for cell in (first, second)]
    assert kinds == [["display_data text/html text/plain"], ["display_data text/html text/plain"] * 2]
    html, text = (first.outputs[0].data[kind] for kind in ("text/html", "text/plain"))
    shown = ("<svg", "<polyline", ">step</text>", ">loss</text>", "eval_loss", "&lt;b&gt;note&lt;/b&gt;: a text")
    for part in ('<progress value="1.0000"', *shown):
        assert part in html, part
    assert "<b>" not in html and html.index("model  Linear") < html.index("<table>") < html.index("end    all epochs")
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "model", "train", "save", "<b>note</b>: a text", "step 4/8", "<b>note</b>: a text", "step 8/8", "end",
    ]  # fmt: skip
    assert "continues at step 8" in second.outputs[0].data["text/plain"]
    afresh = "starts again from the weights of 12 steps; train(more=...) continues instead"
    assert afresh in second.outputs[1].data["text/plain"]
    of_trainer, of_metrics, picture = (output.data for output in third.outputs)
    assert "<pre" in of_trainer["text/html"] and "Trainer\nmodel  Linear, 3 parameters" in of_trainer["text/html"]
    assert "<table>" in of_metrics["text/html"] and "image/png" in picture
    assert test.outputs[0].text.startswith("step 12  epoch 3.00  test_loss")
    assert not captured.outputs and "captured model  Linear" in fresh.outputs[0].text


def _write(path: Path) -> None:
    """Execute a notebook and write it in its place, unless all that is compared is as it was, and images are too."""
    stored = read(path)
    fresh = executed(stored)
    for number, cell in enumerate(fresh.cells):
        cell["id"], cell.metadata = f"cell-{number:02}", {}
    pairs = [*zip(code_cells(stored), code_cells(fresh), strict=True)]
    is_same = _frame(stored) == _frame(fresh) and not any(difference(*pair) for pair in pairs)
    if not is_same:
        nbformat.write(fresh, path)
    print(f"{path}: {'unchanged' if is_same else 'written'}, {path.stat().st_size / 1000:.0f} kB")


def _frame(notebook: NotebookNode) -> list[Any]:
    """Return what is to be the same around the texts of the outputs: metadata, ids, counts, images."""
    cells = [(cell["id"], cell.metadata, cell.get("execution_count")) for cell in notebook.cells]
    images = [output.get("data", {}).get("image/png") for cell in code_cells(notebook) for output in cell.outputs]
    return [notebook.metadata, *cells, *images]


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]) if sys.argv[1:] else NOTEBOOKS:
        _write(file)
