"""Every field of transformers' arguments: none is ignored silently. Those that need little are tried here."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from recipes import StopAt, same, weights
from tiny import Tokens, bert, llama
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_callback import ExportableState

from omnitrain import HFTrainer
from omnitrain.errors import ConfigError
from omnitrain.hf.arguments import UNSUPPORTED

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
NEEDS_STATIC_GRAPH = pytest.mark.skipif(not hasattr(TrainingArguments, "ddp_static_graph"), reason="newer field")


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(folder: str = "run", **options: Any) -> TrainingArguments:
        defaults = {
            "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 8,
            "per_device_train_batch_size": 4, "learning_rate": 0.01, "logging_steps": 1,
        }  # fmt: skip
        return TrainingArguments(str(tmp_path / folder), **{**defaults, **options})

    return make


HONOURED = """
    output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules weight_decay adam_beta1
    adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
    fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps logging_strategy logging_steps
    logging_first_step log_on_each_node log_level log_level_replica include_num_input_tokens_seen disable_tqdm report_to
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
    prediction_loss_only eval_on_start include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps
    save_total_limit push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better full_determinism seed data_seed use_cpu
    accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    remove_unused_columns label_names ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics predict_with_generate generation_max_length
    generation_num_beams generation_config warmup_ratio logging_dir restore_callback_states_from_checkpoint
    length_column_name
"""
WITHOUT_EFFECT = """
    eval_accumulation_steps eval_use_gather_object dataloader_persistent_workers enable_jit_checkpoint
    logging_nan_inf_filter do_train do_eval do_predict
    resume_from_checkpoint local_rank fsdp_config
"""
"""What they set always happens here, or never; or scripts alone read it, as they do with a stock trainer."""


@pytest.mark.skipif(VERSION > (5, 23), reason="newer than what is supported")
def test_of_every_field_it_is_known_what_becomes_of_it() -> None:
    known = {*HONOURED.split(), *WITHOUT_EFFECT.split(), *UNSUPPORTED, "fsdp", "deepspeed", "auto_find_batch_size"}
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} - known == set()
    assert not set(HONOURED.split()) & set(UNSUPPORTED)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_honoured_is_refused_with_a_reason_and_what_to_do(arguments: Any, name: str) -> None:
    args = arguments()
    values = {"train_sampling_strategy": "batch_rebalance", "dataloader_multiprocessing_context": "spawn"}
    setattr(args, name, values.get(name, not UNSUPPORTED[name][0]))
    with pytest.raises(ConfigError) as caught:
        HFTrainer(bert(), args, Tokens(8, "classes"))
    reason, remedy = str(caught.value).partition("by HFTrainer. ")[2], ("Leave it out", "Use ", "Call ")
    assert name in str(caught.value) and len(reason) > 60 and any(word in reason for word in remedy)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"dataloader_in_order": False}, "one order here"),
        ({"dataloader_multiprocessing_context": "spawn", "dataloader_num_workers": 1}, "set_start_method"),
    ],
    ids=str,
)
def test_fields_of_the_loading_that_would_be_ignored_are_refused(
    arguments: Any, said: dict[str, Any], words: str
) -> None:
    if not {field.name for field in dataclasses.fields(TrainingArguments)} >= said.keys():
        pytest.skip("this transformers has no such field")
    with pytest.raises(ConfigError, match=words):
        HFTrainer(bert(), arguments(**said), Tokens(8, "classes"))


# --- schedules that follow evaluations


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
FOLLOWING = [
    ("reduce_lr_on_plateau", None),
    ("reduce_lr_on_plateau", {"patience": 0, "threshold": 10.0}),
    ("greedy", None),
    ("greedy", {"patience": 1, "factor": 0.5, "min_lr": 1e-5}),
]


def skip_unless_there(kind: str) -> None:
    if kind not in [one.value for one in transformers.SchedulerType]:
        pytest.skip("this transformers has no such schedule")


@pytest.mark.parametrize(("kind", "options"), FOLLOWING)
def test_schedules_that_follow_evaluations_have_the_rates_of_a_stock_trainer(
    arguments: Any, kind: str, options: Any
) -> None:
    skip_unless_there(kind)
    found = []
    for trainer_kind in (transformers.Trainer, HFTrainer):
        args = arguments(lr_scheduler_type=kind, lr_scheduler_kwargs=options or {}, **EVALUATED)
        data = Tokens(4, "classes")
        trainer: Any = trainer_kind(bert(), args, train_dataset=data, eval_dataset=data)
        trainer.train()
        state = trainer.state if trainer_kind is transformers.Trainer else trainer.engine.state
        found.append([row["learning_rate"] for row in state.log_history if "learning_rate" in row])
    assert len(found[0]) == 8 and (options is None or len(set(found[0])) > 2)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize(("kind", "options"), FOLLOWING)
def test_their_state_is_kept_over_a_resume(arguments: Any, kind: str, options: Any) -> None:
    skip_unless_there(kind)

    def run(folder: str, *callbacks: Any, resume: Any = None) -> Any:
        args = arguments(
            folder, lr_scheduler_type=kind, lr_scheduler_kwargs=options or {}, save_strategy="steps", save_steps=1,
            **EVALUATED,
        )  # fmt: skip
        data = Tokens(8, "classes")
        trainer = HFTrainer(bert(), args, data, data, callbacks=callbacks)
        trainer.train(resume_from=resume)
        return trainer

    straight = run("straight")
    run("parts", StopAt(3))
    assert same(weights(straight.model), weights(run("parts", resume="auto").model))


# --- others


def test_a_compiled_model_trains_evaluates_and_saves_as_any_other(arguments: Any, tmp_path: Path) -> None:
    data, found = Tokens(8, "classes"), []
    for compiles in (False, True):
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiles else {}
        trainer = HFTrainer(bert(), arguments(max_steps=3, **EVALUATED, **options), data, data)
        metrics = trainer.train()
        trainer.save_model(tmp_path / f"model {compiles}")
        found.append([*weights(trainer.get_model()), torch.tensor(metrics["valid"][-1]["eval_loss"])])
    assert max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)) <= 1e-6


class Renamed(torch.nn.Module):
    """A classifier that has a word of its own for labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bert()

    def forward(self, input_ids: torch.Tensor, answer: torch.Tensor | None = None) -> Any:
        return self.body(input_ids=input_ids, labels=answer)


def test_labels_under_a_name_of_the_users_own_reach_the_metrics(arguments: Any) -> None:
    data: Any = [{"input_ids": row["input_ids"], "answer": row["labels"]} for row in Tokens(8, "classes")]
    found = []
    for kind in (transformers.Trainer, HFTrainer):
        args = arguments(label_names=["answer"], max_steps=1)
        trainer: Any = kind(
            Renamed(), args, train_dataset=data, eval_dataset=data,
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )  # fmt: skip
        prediction = trainer.predict(data)
        labels = prediction.label_ids if kind is transformers.Trainer else prediction.labels
        found.append((trainer.evaluate()["eval_accuracy"], prediction.metrics["test_accuracy"], labels.tolist()))
    assert found[0] == found[1]


def test_columns_that_the_user_calls_labels_are_kept(arguments: Any) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "gold": [0, 1, 2, 0], "other": [1] * 4})
    seen = []

    def note(features: Any) -> Any:
        seen.append(set(features[0]))
        return {
            "input_ids": torch.tensor([one["input_ids"] for one in features]),
            "labels": torch.tensor([one["gold"] for one in features]),
        }

    HFTrainer(bert(), arguments(label_names=["gold"], max_steps=1), data, data_collator=note).train()
    assert seen[0] == {"input_ids", "gold"}


def tokens_of(trainer: Any) -> list[int]:
    history = (trainer.engine if isinstance(trainer, HFTrainer) else trainer).state.log_history
    return [row["num_input_tokens_seen"] for row in history if "loss" in row]


def test_tokens_are_counted_as_by_a_stock_trainer_and_over_a_resume(arguments: Any) -> None:
    options = {"include_num_input_tokens_seen": "all", "save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    stock = transformers.Trainer(bert(), arguments("stock", **options), train_dataset=Tokens(8, "classes"))
    stock.train()
    HFTrainer(bert(), arguments("parts", **options), Tokens(8, "classes"), callbacks=[StopAt(3)]).train()
    resumed = HFTrainer(bert(), arguments("parts", **options), Tokens(8, "classes"))
    resumed.train(resume_from="auto")
    assert tokens_of(resumed) == tokens_of(stock) == [36, 72, 108, 144, 180]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Tokens(8, "classes")


def test_tokens_of_a_stream_cannot_be_counted_and_that_is_told(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"include_num_input_tokens_seen='all'.*no effect on a stream"):
        HFTrainer(bert(), arguments(include_num_input_tokens_seen="all"), Stream())


def test_noise_on_embeddings_is_of_the_training_alone(arguments: Any) -> None:
    data, losses, models = Tokens(8), [], []
    for alpha in (None, 5.0):
        trainer = HFTrainer(llama(), arguments(neftune_noise_alpha=alpha, max_steps=2), data, data)
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        models.append(weights(trainer.model))
    assert losses[0] == losses[1] and not same(*models)


def test_the_accumulation_may_be_said_in_the_settings_for_accelerate(arguments: Any) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = arguments(accelerator_config=config, max_steps=-1, num_train_epochs=1)
    for _ in range(2):  # the user's own settings stay as they are, for a second trainer
        trainer = HFTrainer(bert(), args, Tokens(16, "classes"))
        trainer.train()
        assert (trainer.gradient_accumulation_steps, trainer.progress.step) == (2, 2)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=4.*num_steps=2"):
        HFTrainer(bert(), arguments(accelerator_config=config, gradient_accumulation_steps=4), Tokens(8, "classes"))


def test_gradients_of_each_batch_are_exchanged_where_that_is_asked_for(arguments: Any) -> None:
    eager, seen = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}, []

    class Notes(HFTrainer):
        def _accumulating(self, last: bool) -> Any:
            seen.append(last)
            return super()._accumulating(last)

    args = arguments(accelerator_config=eager, gradient_accumulation_steps=3, max_steps=2)
    Notes(bert(), args, Tokens(16, "classes")).train()
    assert seen and all(seen)
    config = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    with pytest.raises(ConfigError, match=r"sync_each_batch=True.*DeepSpeed"):
        HFTrainer(bert(), arguments(accelerator_config=eager, deepspeed=config), Tokens(8, "classes"))


# --- fields that act on the optimizer, on the model, on logs and on the program, beside a stock Trainer

KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)


def trained(kind: Any, args: TrainingArguments, model: Any = None, **options: Any) -> Any:
    trainer = kind(bert() if model is None else model, args, train_dataset=Tokens(8, "classes"), **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("optim", "options"),
    [("sgd", "momentum=0.5,nesterov=True"), ("rmsprop", "alpha=0.5,centered=True"), ("adagrad", "lr_decay=0.1")],
)
def test_options_of_an_optimizer_are_those_of_a_stock_trainer(arguments: Any, optim: str, options: str) -> None:
    found = []
    for kind in KINDS:
        trainer = kind(bert(), arguments(optim=optim, optim_args=options), train_dataset=Tokens(8, "classes"))
        trainer.create_optimizer()
        found.append(trainer.optimizer.defaults)
    assert found[0] == found[1] and found[1] != type(trainer.optimizer)(bert().parameters(), lr=0.01).defaults


def low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts plain AdamW in the place of GaLore, which is not installed."""
    module: Any = types.ModuleType("galore_torch")
    for name in ("GaLoreAdamW", "GaLoreAdafactor", "GaLoreAdamW8bit"):
        setattr(module, name, type(name, (torch.optim.AdamW,), {}))
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    asks = sys.modules.get("transformers.trainer_optimizer") or sys.modules["transformers.trainer"]  # by the release
    monkeypatch.setattr(asks, "is_galore_torch_available", lambda: True)


def test_an_optimizer_of_low_rank_gets_the_modules_that_are_named(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_rank(monkeypatch)
    said = {"optim": "galore_adamw", "optim_target_modules": ["attention"], "optim_args": "rank=4"}
    groups = []
    for kind in KINDS:
        optimizer = trained(kind, arguments(max_steps=1, **said)).optimizer
        groups.append([(len(group["params"]), group.get("rank")) for group in optimizer.param_groups])
    assert groups[0] == groups[1] and groups[1][1][1] == 4


@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "lomo"])
def test_an_optimizer_that_steps_in_the_backward_is_refused(arguments: Any, optim: str) -> None:
    with pytest.raises(ConfigError, match=f"optim='{optim}'.*updates weights while gradients are computed"):
        HFTrainer(bert(), arguments(optim=optim, optim_target_modules=["attention"]), Tokens(8, "classes"))


def test_what_transformers_does_to_the_model_at_the_start_is_done(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", lambda model, config: seen.append((model, config)))
    monkeypatch.setattr(transformers.trainer, "DebugUnderflowOverflow", seen.append)
    said = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}, "debug": "underflow_overflow"}
    model = trained(HFTrainer, arguments(max_steps=1, **said)).get_model()
    assert seen == [(model, {"rope": False}), model]


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_cache_of_a_model_is_used_as_by_a_stock_trainer(arguments: Any, use_cache: bool) -> None:
    found = []
    for kind in KINDS:
        model = llama()
        kind(model, arguments(use_cache=use_cache), train_dataset=Tokens(8))
        found.append(model.config.use_cache)
    assert found == [use_cache, use_cache]


def test_memory_is_given_back_as_often_as_by_a_stock_trainer(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for kind in KINDS:
        calls: list[None] = []
        monkeypatch.setattr(transformers.trainer, "clear_device_cache", lambda calls=calls: calls.append(None))
        trained(
            kind, arguments(torch_empty_cache_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2)
        )
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_options_of_recomputation_reach_the_model(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, old = [], "gradient_checkpointing_enable"
    for kind in KINDS:
        model, calls = bert(), []
        name = "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else old
        monkeypatch.setattr(model, name, lambda calls=calls, **options: calls.append(options))
        options = {"use_reentrant": False}
        trained(kind, arguments(max_steps=1, gradient_checkpointing=True, gradient_checkpointing_kwargs=options), model)
        found.append(calls[-1])
    assert found[0] == found[1] and "use_reentrant" in str(found[1])


def test_a_mode_of_compilation_reaches_the_compiler(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compile(model: Any, **options: Any) -> Any:
        seen.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    said = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "reduce-overhead"}
    trained(HFTrainer, arguments(max_steps=1, **said))
    assert {(one["backend"], one["mode"]) for one in seen} == {("eager", "reduce-overhead")}


def test_deterministic_kernels_are_those_of_the_run(arguments: Any) -> None:
    seen = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    trained(HFTrainer, arguments(max_steps=1, full_determinism=True), callbacks=[Looks()])
    assert seen == [True]
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"find_unused_parameters": True}),
        ({"ddp_find_unused_parameters": False}, {"find_unused_parameters": False}),
        ({"ddp_bucket_cap_mb": 7}, {"bucket_cap_mb": 7}),
        ({"ddp_broadcast_buffers": False}, {"broadcast_buffers": False}),
        pytest.param({"ddp_static_graph": True}, {"static_graph": True}, marks=NEEDS_STATIC_GRAPH),
    ],
    ids=str,
)
def test_options_of_ddp_reach_accelerate(arguments: Any, said: dict[str, Any], expected: dict[str, Any]) -> None:
    trainer = HFTrainer(bert(), arguments(**said), Tokens(8, "classes"))
    handler = trainer.accelerator.ddp_handler
    assert {name: getattr(handler, name) for name in expected} == expected


@pytest.mark.parametrize("said", [{"log_level": "error"}, {"log_level": "debug"}], ids=str)
def test_transformers_tells_as_much_as_with_a_stock_trainer(arguments: Any, said: dict[str, Any]) -> None:
    before, found = transformers.utils.logging.get_verbosity(), []
    try:
        for kind in KINDS:
            transformers.utils.logging.set_verbosity(before)
            kind(bert(), arguments(**said), train_dataset=Tokens(8, "classes"))
            found.append(transformers.utils.logging.get_verbosity())
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert found[0] == found[1] != before


@pytest.mark.parametrize("verbosity", [transformers.logging.WARNING, transformers.logging.ERROR])
def test_no_bar_means_no_rows_however_much_transformers_tells(verbosity: int, capsys: Any) -> None:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(verbosity)  # which is the default of `disable_tqdm`
    try:
        HFTrainer(bert(), None, Tokens(8, "classes"), max_steps=2, progress_bar=False, log_steps=1).train()
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize("said", [True, "all", "non_padding", "no", False])
def test_tokens_are_counted_as_they_are_asked_for(arguments: Any, said: Any) -> None:
    rows = []
    for kind in KINDS:
        trainer = trained(kind, arguments(include_num_input_tokens_seen=said, max_steps=3))
        rows.append([one.get("num_input_tokens_seen") for one in trainer.state.log_history])
    assert rows[0] == rows[1]


def test_everything_that_is_installed_may_be_reported_to(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    found = []
    for kind in KINDS:
        trainer: Any = kind(bert(), arguments(report_to="all"), train_dataset=Tokens(8, "classes"))
        found.append([type(one).__name__ for one in trainer.callback_handler.callbacks])
    assert found[0] == found[1]


def test_rows_are_printed_where_no_bar_is_wanted_as_by_a_stock_trainer(arguments: Any, capsys: Any) -> None:
    printed = []
    for kind in KINDS:
        trained(kind, arguments(max_steps=2))
        lines = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        printed.append([line.keys() for line in lines])
    assert printed[0] == printed[1] and len(printed[1]) == 3
    trained(HFTrainer, arguments(max_steps=2), progress_bar=False)
    assert "{" not in capsys.readouterr().out


class Patient(transformers.TrainerCallback, ExportableState):
    """Counts steps, and has an argument."""

    def __init__(self, patience: int = 1) -> None:
        self.patience, self.count = patience, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"patience": self.patience}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("restores", [False, True])
def test_states_of_callbacks_are_restored_and_their_arguments_are_the_users(
    arguments: Any, restores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": restores}
    first = [Patient(1), Patient(2), StopAt(4)]
    HFTrainer(bert(), arguments(**said), Tokens(8, "classes"), callbacks=first).train()
    second: list[Any] = [Patient(3), Patient(4)]
    HFTrainer(bert(), arguments(**said), Tokens(8, "classes"), callbacks=second).train(resume_from="auto")
    assert [(one.count, one.patience) for one in second] == [(8, 3), (8, 4)]
    args = arguments(**said)
    HFTrainer(bert(), args, Tokens(8, "classes")).train(resume_from=f"{args.output_dir}/checkpoint-4")
    assert "the state of a callback 'Patient', which is not among the callbacks" in caplog.text
