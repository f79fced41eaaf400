"""Export: a trained network as one file that runs without its Python code, next to its weights.

    python examples/export.py

`torch.export` records what the network does, for a batch of any size; PyTorch runs that without the class of the model.
With the packages `onnx` and `onnxscript` there is an ONNX file too. Each file should give the outputs of the network.
In plain PyTorch: about 22 lines for the loop, the evaluation and the best weights; with the trainer 5.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.export import Dim

from omnitrain import Trainer


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
        self.classes = nn.Linear(16 * 9, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.features(images / 16).flatten(1))  # the scaling of the pixels is exported too


def export(model: nn.Module, images: Tensor, folder: Path) -> list[Path]:
    model = model.eval()  # BatchNorm and Dropout are recorded as they are now
    example, dynamic = (images[:2],), ({0: Dim("batch")},)  # a first dimension of 1 would be recorded as fixed
    program = torch.export.export(model, example, dynamic_shapes=dynamic)
    files = [folder / "model.pt2"]
    torch.export.save(program, files[0])
    if find_spec("onnx") and find_spec("onnxscript"):
        files.append(folder / "model.onnx")
        torch.onnx.export(program, (), files[1], input_names=["images"], output_names=["scores"], verbose=False)
    return files


def run(file: Path, images: Tensor) -> Tensor:
    if file.suffix == ".pt2":
        return torch.export.load(file).module()(images)
    reference = import_module("onnx.reference").ReferenceEvaluator(str(file))  # slow; use the package onnxruntime
    return torch.from_numpy(reference.run(None, {"images": images.numpy()})[0])


def main(epochs: int = 8) -> dict[str, float]:
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(classes)
    torch.manual_seed(0)  # the weights that the model starts from
    options = {"compute_metrics": "accuracy", "epochs": epochs, "batch_size": 32, "learning_rate": 1e-2}
    train, valid = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
    trainer = Trainer(Reader(), train, valid, loss_fn=nn.functional.cross_entropy, log_steps="2ep", **options)
    results = {"accuracy": trainer.train()["best_valid"]["accuracy"]}
    model = trainer.model.cpu().eval()
    with TemporaryDirectory() as folder, torch.no_grad():
        saved = Path(trainer.save_model(folder))
        for file in export(model, images, saved):
            errors = [run(file, images[:size]) - model(images[:size]) for size in (1, 7, 1797)]
            results[file.name] = max(float(error.abs().max()) for error in errors)
            print(f"{file.name}: largest difference to the outputs of the network {results[file.name]:.1e}")
        print(f"accuracy {results['accuracy']:.3f}; files:", ", ".join(sorted(path.name for path in saved.iterdir())))
    if "model.onnx" not in results:
        print("no ONNX file, which needs the packages onnx and onnxscript")
    return results


if __name__ == "__main__":
    main()
