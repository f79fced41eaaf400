"""Full models from checkpoints of adapters or trained weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.initial_weights import read_weights
from omnitrain.checkpoint.model_files import BASE, CONFIG, check_fingerprints
from omnitrain.checkpoint.safetensors_header import find_tensor_files
from omnitrain.checkpoint.state_dicts import WEIGHTS, load_weights, model_tensors
from omnitrain.checkpoint.tensor_files import TensorFile, fingerprints, save_tensors
from omnitrain.core.errors import CheckpointError, ConfigError, MissingExtraError
from omnitrain.distributed.ranks import Ranks


def adapter_folders(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders of the adapters in a checkpoint by name; that of "default" is the checkpoint's."""
    folders = [Path(file).parent.as_posix() for file in content["files"] if Path(file).name == CONFIG]
    return {"default" if folder == "." else folder: folder for folder in folders}


def write_merged(folder: Path, content: Mapping[str, Any], base: Path | None, adapter: str | None, out: Path) -> str:
    """Write the full model of a checkpoint, and return a description of what was merged.

    Args:
        folder: A verified checkpoint.
        content: Its omnitrain.json.
        base: The folder of the frozen weights; None if the checkpoint has them.
        adapter: Which of several adapters to merge.
        out: A new folder.

    Raises:
        CheckpointError: If the base is not the one of the run.
        ConfigError: If there is nothing to merge, the base is needed, or the adapters cannot be merged.
        MissingExtraError: If PEFT or transformers is not installed.
    """
    adapters, frozen = adapter_folders(content), content.get("frozen") or {}
    if not adapters and not frozen:
        raise ConfigError(f"{str(folder)!r} has the full model: nothing has to be merged. Leave --merge out.")
    if frozen and base is None:
        raise ConfigError(
            f"{str(folder)!r} was saved without the {len(frozen)} tensors that did not train. Pass the folder that the "
            "base of the run was loaded from: --merge BASE."
        )
    if base is not None and not base.is_dir():
        raise ConfigError(f"--merge takes the folder of the base's weights, got {str(base)!r}, which is not a folder.")
    if not adapters:
        assert base is not None
        return _write_joined(folder, content, base, out)
    if adapter is None and len(adapters) > 1:
        raise ConfigError(f"{str(folder)!r} has the adapters {', '.join(adapters)}. Say which: --adapter NAME.")
    chosen = next(iter(adapters)) if adapter is None else adapter
    if chosen not in adapters:
        raise ConfigError(f"{str(folder)!r} has no adapter {chosen!r}, only {', '.join(adapters)}.")
    try:
        model = _load_peft_model(folder, content, adapters, base)
    except ImportError as error:
        raise MissingExtraError("`omnitrain checkpoint export --merge`", error.name or "peft") from error
    if not hasattr(model.base_model, "merge_and_unload"):
        kind = model.peft_config[chosen].peft_type
        raise ConfigError(f"PEFT cannot merge adapters of the kind {getattr(kind, 'value', kind)} into their base.")
    model.set_adapter(chosen)
    model.merge_and_unload(adapter_names=[chosen]).save_pretrained(out)
    return f"the adapter {chosen!r} merged into its base"


# --- adapters


def _load_peft_model(folder: Path, content: Mapping[str, Any], adapters: Mapping[str, str], base: Path | None) -> Any:
    from peft import PeftModel

    model: Any = None
    for name, subfolder in adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(
                _load_base(folder, content, base), str(folder / subfolder), adapter_name=name
            )
        else:
            model.load_adapter(str(folder / subfolder), name)
    tensors, frozen = _checkpoint_weights(folder, content), content.get("frozen") or {}
    prefix = "base_model.model."
    if not any(name.startswith(prefix) for name in [*tensors, *frozen]):  # adapters from `add_adapter`
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        frozen = {prefix + name: digest for name, digest in frozen.items()}
    for name, tensor in model.named_parameters():  # PEFT creates new ones in fp32
        if name in tensors:
            tensor.data = tensor.data.to(tensors[name].dtype)
    load_weights(model, tensors, repr(str(folder)), absent=frozen)
    _check_base(folder, frozen, model_tensors(model), base)
    return model


def _check_base(folder: Path, frozen: Mapping[str, str], weights: Mapping[str, Any], base: Path | None) -> None:
    """Reject a base whose weights are not those that a checkpoint excludes."""
    current = fingerprints({name: weights[name] for name in frozen}, Ranks())
    check_fingerprints(frozen, current, repr(str(folder)), f"Pass the base of that run, not {str(base)!r}.")


def _load_base(folder: Path, content: Mapping[str, Any], base: Path | None) -> Any:
    """Return the adapters' base model: with its weights, or uninitialized if the checkpoint has them."""
    import transformers

    file = f"{BASE}/config.json"
    if file not in content["files"]:
        raise ConfigError(
            f"The base of {str(folder)!r} is not a model of transformers: only your code can build it. Merge "
            "in Python: `PeftModel.from_pretrained(base, folder).merge_and_unload()`."
        )
    config = json.loads((folder / file).read_text())
    if config.get("quantization_config") or (base is not None and _is_quantized(base)):
        raise ConfigError(
            "The base is quantized, and adapters that are merged into rounded weights are rounded with them. "
            "Pass the folder of the base before it was quantized: --merge BASE."
        )
    name = (config.get("architectures") or [""])[0]
    cls = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ConfigError(
            f"transformers {transformers.__version__} has no model {name!r}, the base's class. Merge in Python: "
            "`PeftModel.from_pretrained(base, folder).merge_and_unload()`."
        )
    kind: Any = cls.config_class
    model_config = kind.from_pretrained(folder / BASE)
    if base is None:
        return cls(model_config)
    # a new head differs in size from the base's: the checkpoint has it, and all other weights are compared
    return cls.from_pretrained(base, config=model_config, dtype="auto", ignore_mismatched_sizes=True)


def _is_quantized(base: Path) -> bool:
    config = base / "config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("quantization_config"))


# --- weights that were not trained


def _checkpoint_weights(folder: Path, content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return dict(TensorFile(find_tensor_files(folder, content["files"], WEIGHTS) or [folder / WEIGHTS]))


def _write_joined(folder: Path, content: Mapping[str, Any], base: Path, out: Path) -> str:
    tensors, frozen = _checkpoint_weights(folder, content), content["frozen"]
    weights = read_weights(base, repr(str(base)))
    missing = sorted(frozen.keys() - weights.keys())
    if missing:
        raise CheckpointError(f"{str(base)!r} has no {missing[0]!r}: it is not the base of that run. Pass that one.")
    rest = {name: weights[name] for name in weights if name in frozen}
    _check_base(folder, frozen, rest, base)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)
    save_tensors({**tensors, **rest}, out / WEIGHTS)
    return f"the {len(tensors)} tensors of the checkpoint and the {len(rest)} of {base} that did not train"
