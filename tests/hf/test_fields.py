"""Every field of TrainingArguments is honoured or rejected. Those that need little are tested here."""

import ast
import dataclasses
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from counting import Streamed
from marks import thinned
from recipes import (
    Sentences,
    Starving,
    StopAt,
    Tagger,
    Trace,
    callback,
    distance,
    fit,
    rows,
    same,
    trainer_on_cpu,
    weights,
)
from tiny import Tokens, bert, llama
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_callback import ExportableState

from omnitrain import HFTrainer, Trainer
from omnitrain.core.errors import ConfigError
from omnitrain.hf.arguments import UNSUPPORTED

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)
DEFAULTS = {
    "disable_tqdm": True, "max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 0.01, "logging_steps": 1
}  # fmt: skip


def trained(kind: Any, args: TrainingArguments | None, model: Any = None, resume: Any = None, **options: Any) -> Any:
    """A trainer of a classifier of 8 samples, after its run."""
    trainer = kind(model or bert(), args, **{"train_dataset": Tokens(8, "classes"), **options})
    return fit(trainer, **({"resume_from": resume} if resume else {}))


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
"""What they set always happens, or never; or only scripts read it, as they do with a stock trainer."""


@pytest.mark.skipif(VERSION > (5, 23), reason="newer than what is supported")
def test_fields_are_all_honoured_or_rejected() -> None:
    known = {*HONOURED.split(), *WITHOUT_EFFECT.split(), *UNSUPPORTED, "fsdp", "deepspeed", "auto_find_batch_size"}
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} - known == set()
    assert not set(HONOURED.split()) & set(UNSUPPORTED)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_field_is_rejected_with_a_remedy(arguments: Any, name: str) -> None:
    args = arguments()
    values = {"train_sampling_strategy": "batch_rebalance", "dataloader_multiprocessing_context": "spawn"}
    setattr(args, name, values.get(name, not UNSUPPORTED[name][0][0]))
    with pytest.raises(ConfigError) as error:
        HFTrainer(bert(), args, Tokens(8, "classes"))
    reason, remedies = str(error.value).partition("by HFTrainer. ")[2], ("Leave it out", "Use ", "Call ")
    assert name in str(error.value) and len(reason) > 60 and any(remedy in reason for remedy in remedies)


def agreed(read: Callable[[Any], Any]) -> Any:
    """Return what a function of the class has for ours, after a check that it has the same for a stock trainer."""
    stock, ours = map(read, KINDS)
    assert ours == stock
    return ours


@pytest.mark.parametrize(("schedule", "options"), [
    ("reduce_lr_on_plateau", {"patience": 0, "threshold": 10.0}),
    pytest.param("greedy", {"patience": 1, "factor": 0.5, "min_lr": 1e-5}, marks=pytest.mark.slow),
])  # fmt: skip
def test_metric_schedules_are_those_of_a_stock_trainer(arguments: Any, schedule: str, options: Any) -> None:
    """And a resumed run continues them to the bit."""
    if schedule not in [member.value for member in transformers.SchedulerType]:
        pytest.skip("this transformers has no such schedule")
    fields = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options, "max_steps": 6}
    fields |= {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    data = {"eval_dataset": Tokens(4, "classes")}
    stock, straight = (trained(kind, arguments(kind.__name__, **fields), **data) for kind in KINDS)
    expected, rates = (
        [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        for trainer in (stock, straight)
    )
    assert rates == pytest.approx(expected, rel=1e-12) and len(rates) == 6 and len(set(rates)) > 2
    trained(HFTrainer, arguments("parts", **fields), callbacks=[StopAt(3)], **data)
    resumed = trained(HFTrainer, arguments("parts", **fields), resume="auto", **data)
    assert same(weights(straight.model), weights(resumed.model))


def test_schedule_spans_the_tokens_of_a_run(arguments: Any) -> None:
    """The number of steps is unknown, and a fraction of the run is warm-up."""
    common: dict[str, Any] = {"lr_scheduler_kwargs": {"min_lr": 0.005}, "warmup_steps": 0.2}
    args = arguments(lr_scheduler_type="cosine_with_min_lr", optim="sgd", max_steps=-1, **common)
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    native = {"batch_size": 4, "optimizer": sgd, "lr_scheduler": "cosine_with_min_lr", **common}
    rates = []
    for kind, options in ((Trainer, native), (HFTrainer, {"args": args})):
        trace = Trace()
        options |= {"callbacks": [trace], "max_duration": "200tok", "log_steps": 1}
        fit(trainer_on_cpu(kind, Tagger(), Sentences(20), **options))
        rates.append([row["learning_rate"] for row in trace.logs if "learning_rate" in row])
    assert rates[0] == rates[1] and len(set(rates[0])) > 5


@pytest.mark.parametrize("value", thinned(["all", "non_padding", "no"], ["non_padding"]))
def test_input_tokens_are_counted_as_by_a_stock_trainer(arguments: Any, value: Any) -> None:
    """Also over a resume."""
    fields = {"include_num_input_tokens_seen": value, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trained(HFTrainer, arguments("HFTrainer", **fields), callbacks=[StopAt(2)])
    counts = []
    split = {"train_dataset": Streamed(Tokens(8, "classes")), "microbatch_size": 2}
    for kind, resume, data in ((KINDS[0], None, {}), (HFTrainer, "auto", {}), (HFTrainer, None, split)):
        folder = f"{kind.__name__}{'-split' if data else ''}"
        history = trained(kind, arguments(folder, **fields), resume=resume, **data).state.log_history
        counts.append([row.get("num_input_tokens_seen") for row in history if "loss" in row])
    assert counts[0] == counts[1] == counts[2] and len(counts[0]) == 3


def test_accelerator_config_sets_accumulation_and_exchanges(arguments: Any) -> None:
    config: Any = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = arguments(accelerator_config=config, max_steps=-1, num_train_epochs=1)
    for _ in range(2):  # the same settings can be used for a second trainer
        trainer = trained(HFTrainer, args, train_dataset=Tokens(16, "classes"))
        assert (trainer.gradient_accumulation_steps, trainer.progress.step) == (2, 2)
        assert trainer.args.gradient_accumulation_steps == 2  # as in transformers
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    args = arguments(accelerator_config=config, gradient_accumulation_steps=3, max_steps=2)
    trainer = HFTrainer(bert(), args, Tokens(16, "classes"))
    with mock.patch.object(trainer, "_accumulating", wraps=trainer._accumulating) as accumulating:
        trainer.train()
    assert {call.args or tuple(call.kwargs.values()) for call in accumulating.call_args_list} == {(True,)}


FINDS = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}


def test_auto_find_batch_size_gives_the_numbers_of_small_ones(arguments: Any) -> None:
    """Of a stream, whose rows in the log of transformers count micro-batches."""

    def rows_of(trainer: Any) -> list[dict[str, Any]]:
        """Return all rows without durations, and without the epoch, which transformers counts in micro-batches."""
        rows = [*trainer.metrics["train_metrics_history"], *trainer.metrics["valid"], *trainer.state.log_history]
        ignored = ("runtime", "per_second", "epoch")
        return [{key: value for key, value in row.items() if not key.endswith(ignored)} for row in rows]

    fields = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 9, "logging_steps": 2}
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    data = {"train_dataset": Streamed(rows(20)), "eval_dataset": rows(5), "loss_fn": F.mse_loss}
    trainer = trained(HFTrainer, arguments("found", **FINDS, **fields), Starving(room=3), **data)
    expected = trained(HFTrainer, arguments("small", **small, **fields), Starving(), **data)
    assert distance(weights(trainer.get_model()), weights(expected.get_model())) <= 1e-12
    positions = [each.progress.state_dict() | {"seconds": 0, "batches_in_epoch": 0} for each in (trainer, expected)]
    assert positions[0] == positions[1] and trainer.progress.step == 9
    for row, other in zip(rows_of(trainer), rows_of(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-6)  # transformers adds losses up in float32
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (8, 1)
    assert trainer.get_model().sizes[:3] == [8, 4, 2] and max(trainer.get_model().sizes[3:]) == 2


def test_auto_find_batch_size_saves_both_sizes(arguments: Any) -> None:
    """A second run begins with the smaller one, and callbacks get each event once."""
    events: list[str] = []
    functions = {name: lambda *_, name=name, **__: events.append(name) for name in ("on_epoch_begin", "on_step_begin")}
    data = {"train_dataset": rows(20), "loss_fn": F.mse_loss}
    data["callbacks"] = [callback(transformers.TrainerCallback, **functions)]
    args = arguments(**FINDS, save_strategy="epoch", max_steps=-1, num_train_epochs=1)
    trainer = trained(HFTrainer, args, Starving(room=2, start=1), **data)
    assert events == ["on_epoch_begin", *["on_step_begin"] * 3]
    _, content = trainer.store.resolve("last")
    names = ("batch_size", "gradient_accumulation_steps", "global_batch_size", "microbatch_size")
    assert [content["settings"][name] for name in names] == [8, 1, 8, "auto"]
    assert content["loop"]["microbatch_size"] == 2
    trainer.get_model().sizes.clear()
    trainer.train()
    assert max(trainer.get_model().sizes) == 2 and trainer.progress.step == 3


@pytest.mark.parametrize(("optim", "options"), [
    ("sgd", "momentum=0.5,nesterov=True"), ("rmsprop", "alpha=0.5,centered=True"), ("adagrad", "lr_decay=0.1"),
    ("adafactor", None), ("adamw_torch", None),
])  # fmt: skip
def test_optim_and_its_options_are_those_of_a_stock_trainer(arguments: Any, optim: str, options: str | None) -> None:
    fields = {"weight_decay": 0.25, "adam_beta1": 0.5, "adam_beta2": 0.75, "adam_epsilon": 1e-3}
    args = arguments(optim=optim, optim_args=options, **fields)

    def created(kind: Any) -> Any:
        trainer = kind(bert(), args, train_dataset=Tokens(8, "classes"))
        trainer.create_optimizer()
        groups = [(len(group["params"]), group["weight_decay"]) for group in trainer.optimizer.param_groups]
        return type(trainer.optimizer), trainer.optimizer.defaults, groups

    kind, defaults, groups = agreed(created)
    assert {decay for _, decay in groups} == {0.25, 0.0}  # none on biases
    assert not options or defaults != kind(bert().parameters(), lr=0.01).defaults


def test_optim_target_modules_reach_the_optimizer(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AdamW in the place of GaLore, which is not installed."""
    galore: Any = types.ModuleType("galore_torch")
    for name in ("GaLoreAdamW", "GaLoreAdafactor", "GaLoreAdamW8bit"):
        setattr(galore, name, type(name, (torch.optim.AdamW,), {}))
    monkeypatch.setitem(sys.modules, "galore_torch", galore)
    module = sys.modules.get("transformers.trainer_optimizer") or sys.modules["transformers.trainer"]  # by the release
    monkeypatch.setattr(module, "is_galore_torch_available", lambda: True)
    args = arguments(max_steps=1, optim="galore_adamw", optim_target_modules=["attention"], optim_args="rank=4")
    groups = agreed(
        lambda kind: [(len(group["params"]), group.get("rank")) for group in trained(kind, args).optimizer.param_groups]
    )
    assert groups[1][1] == 4


def test_neftune_noise_is_only_in_training(arguments: Any) -> None:
    both = (arguments(neftune_noise_alpha=alpha, max_steps=2) for alpha in (None, 5.0))
    plain, noisy = (HFTrainer(llama(), args, Tokens(8), Tokens(8)) for args in both)
    assert plain.evaluate()["eval_loss"] == noisy.evaluate()["eval_loss"]
    assert not same(weights(fit(plain).model), weights(fit(noisy).model))


def test_fields_of_compiler_liger_and_debug_reach_the_model(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def compile(model: Any, **options: Any) -> Any:
        calls.append((options["backend"], options["mode"]))
        return model

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", lambda model, config: calls.append((model, config)))
    monkeypatch.setattr(transformers.trainer, "DebugUnderflowOverflow", calls.append)
    fields = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "reduce-overhead"}
    fields |= {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}, "debug": "underflow_overflow"}
    model = trained(HFTrainer, arguments(max_steps=1, **fields)).get_model()
    assert [calls.count(call) for call in ((model, {"rope": False}), model)] == [1, 1]
    assert {call for call in calls if call not in ((model, {"rope": False}), model)} == {("eager", "reduce-overhead")}


def test_use_cache_is_set_as_by_a_stock_trainer(arguments: Any) -> None:
    for use_cache, kind in itertools.product((True, False), KINDS):
        model = llama()
        kind(model, arguments(use_cache=use_cache), train_dataset=Tokens(8))
        assert model.config.use_cache is use_cache


def test_options_of_recomputation_reach_the_model(arguments: Any) -> None:
    args = arguments(max_steps=1, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})

    def passed(kind: Any) -> Any:
        model = bert()
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # newer, older
        with mock.patch.object(model, next(name for name in names if hasattr(model, name))) as enable:
            trained(kind, args, model)
        return enable.call_args

    assert "use_reentrant" in str(agreed(passed))


def test_torch_empty_cache_steps_act_as_in_a_stock_trainer(arguments: Any) -> None:
    args = arguments(torch_empty_cache_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2)

    def count(kind: Any) -> int:
        with mock.patch.object(transformers.trainer, "clear_device_cache") as clear:
            trained(kind, args)
        return clear.call_count

    assert agreed(count) > 0


def test_full_determinism_holds_in_the_run(arguments: Any) -> None:
    values: list[bool] = []
    note = lambda *_, **__: values.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
    looks = callback(transformers.TrainerCallback, on_step_end=note)
    trained(HFTrainer, arguments(max_steps=1, full_determinism=True), callbacks=[looks])
    assert values == [True]
    torch.use_deterministic_algorithms(False)


def test_ddp_options_reach_accelerate(arguments: Any) -> None:
    cases = [
        ({}, {"find_unused_parameters": True}),
        ({"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 7}, {"bucket_cap_mb": 7}),
        ({"ddp_find_unused_parameters": False}, {"find_unused_parameters": False}),
        ({"ddp_broadcast_buffers": False}, {"broadcast_buffers": False}),
    ]
    if "ddp_static_graph" in FIELDS:
        cases.append(({"ddp_static_graph": True}, {"static_graph": True}))
    for fields, expected in cases:
        handler = HFTrainer(bert(), arguments(**fields), Tokens(8, "classes")).accelerator.ddp_handler
        assert {name: getattr(handler, name) for name in expected} == expected


@pytest.fixture
def verbosity() -> Iterator[int]:
    """The verbosity of transformers, which is reset afterwards."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_warning()
    yield transformers.logging.WARNING
    transformers.utils.logging.set_verbosity(before)


@pytest.mark.parametrize("level", ["error", "debug"])
def test_log_level_is_that_of_a_stock_trainer(arguments: Any, level: str, verbosity: int) -> None:
    def chosen(kind: Any) -> int:
        transformers.utils.logging.set_verbosity(verbosity)
        kind(bert(), arguments(log_level=level), train_dataset=Tokens(8, "classes"))
        return transformers.utils.logging.get_verbosity()

    assert agreed(chosen) != verbosity


@pytest.mark.usefixtures("verbosity")
def test_rows_are_printed_as_by_a_stock_trainer(arguments: Any, capsys: Any) -> None:
    def printed(kind: Any) -> Any:
        trained(kind, arguments(max_steps=2))
        lines = capsys.readouterr().out.splitlines()
        return [ast.literal_eval(line).keys() for line in lines if line.startswith("{")]

    assert len(agreed(printed)) == 3
    for level in (transformers.logging.WARNING, transformers.logging.ERROR):  # the default of `disable_tqdm`
        transformers.utils.logging.set_verbosity(level)
        for args, options in ((arguments(max_steps=2), {}), (None, {"max_steps": 2, "log_steps": 1})):
            trained(HFTrainer, args, progress_bar=False, **options)
            assert "loss" not in capsys.readouterr().out


class Patient(transformers.TrainerCallback, ExportableState):
    """Counts steps, and has an argument."""

    def __init__(self, patience: int = 1) -> None:
        self.patience, self.count = patience, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"patience": self.patience}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("restores", thinned([False, True], [False]))
def test_callback_states_are_restored(arguments: Any, restores: bool, caplog: Any, monkeypatch: Any) -> None:
    """Without pickle, and also of a run that has finished; arguments if the training arguments request it."""
    monkeypatch.setattr(torch, "load", None)
    fields = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    args = arguments(**fields, restore_callback_states_from_checkpoint=restores)
    first = trained(HFTrainer, args, callbacks=[Patient(1), Patient(2), StopAt(2)])
    for _ in range(2):
        callbacks = [Patient(3), Patient(4)]
        trainer = trained(HFTrainer, args, resume="auto", callbacks=callbacks)
        patience = (1, 2) if restores else (3, 4)
        assert [(each.count, each.patience) for each in callbacks] == [(3, patience[0]), (3, patience[1])]
        assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3]
        assert trainer.state.eval_steps == first.state.eval_steps
    assert "the state of a callback" not in caplog.text
    trained(HFTrainer, args, resume=f"{args.output_dir}/checkpoint-2")
    assert "the state of a callback 'Patient', which is not among the callbacks" in caplog.text


@pytest.mark.parametrize("restores", [False, True])
def test_early_stopping_is_restored_with_its_patience(arguments: Any, restores: bool) -> None:
    fields = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args = arguments(
        **fields, max_steps=4, learning_rate=0.0, metric_for_best_model="loss",
        restore_callback_states_from_checkpoint=restores,
    )  # fmt: skip
    steps = []
    for patience, resume in ((9, None), (1, f"{args.output_dir}/checkpoint-3")):
        stopping = transformers.EarlyStoppingCallback(patience)
        options = {"callbacks": [stopping], "eval_dataset": Tokens(8, "classes")}
        steps.append(trained(HFTrainer, args, resume=resume, **options).progress.step)
    assert steps == [4, 4 if restores else 3]
