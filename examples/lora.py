"""Fine-tune with LoRA: PEFT's adapters in a vision transformer, whose own weights stay as they are.

    python examples/lora.py

The base model learns to read handwritten digits, and the adapters to read digits lying on their side. Checkpoints and
`save_model` hold the adapters alone, in PEFT's own form. Needs the extra `hf` and the package `peft`.
In plain PyTorch and PEFT: about 39 lines for loops, warm-up and the best weights; with the trainer 15.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from omnitrain import Trainer


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, **options: Any) -> Trainer:
    trainer = Trainer(
        model,
        {"pixel_values": images[:1400], "labels": labels[:1400]},
        {"pixel_values": images[1400:], "labels": labels[1400:]},
        compute_metrics="accuracy",
        optimization_metric="accuracy",
        epochs=epochs,
        batch_size=32,
        eval_batch_size=400,
        lr_scheduler="cosine",
        warmup_steps=20,
        log_steps="2ep",
        **options,
    )
    trainer.train()
    return trainer


def main(epochs: int = 6) -> dict[str, float]:
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(classes)
    on_their_side = images.transpose(2, 3).contiguous()

    torch.manual_seed(0)  # the weights that the models start from
    config: dict[str, Any] = {
        "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 96, "hidden_dropout_prob": 0.0, "num_labels": 10,
    }  # fmt: skip
    base = ViTForImageClassification(ViTConfig(**config))
    pretrained = train(base, images, labels, epochs, learning_rate=3e-3)
    before = pretrained.evaluate({"pixel_values": on_their_side[1400:], "labels": labels[1400:]})["eval_accuracy"]

    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", modules_to_save=["classifier"]))
    trainer = train(model, on_their_side, labels, epochs, learning_rate=1e-2)
    after = trainer.metrics["best_valid"]["accuracy"]
    with TemporaryDirectory() as folder:
        saved = [file.name for file in Path(trainer.save_model(f"{folder}/adapter")).iterdir()]
    trainable, total = model.get_nb_trainable_parameters()
    print(f"{trainable} of {total} weights train; saved: {', '.join(sorted(saved))}")
    print(f"accuracy on digits on their side: {before:.3f} before, {after:.3f} after")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
