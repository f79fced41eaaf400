"""The table of arguments that fuzzed runs draw from: where each is valid, and what it does to the numbers."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fuzz.kinds import KINDS

TRAINERS = ("Trainer", "AccelerateTrainer", "HFTrainer")
BACKENDS = {
    "ddp": "AccelerateTrainer",
    "fsdp": "AccelerateTrainer, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)",
    "zero2": "AccelerateTrainer, deepspeed_config={'zero_optimization': {'stage': 2}}",
    "hf2": "HFTrainer",
}
"""Trainers on two processes, and the arguments that choose how they share the work."""


@dataclass(frozen=True)
class Option:
    """A value of one or several arguments: a row of the table.

    Aspects of a run are the "weights" in training; perhaps those ("drift"), or only their "rounding"; the "scores" of
    evaluations. Its "length", when "evaluations" and "saves" come, and the "choice" of the best may differ.
    """

    text: str  # the arguments as a call has them
    alters: str = ""  # aspects that differ with it
    follows: str = ""  # aspects that its effect depends on: what alters them may alter, through it, what it alters
    needs: str = ""  # traits of the kind, or the trainer, without which it is invalid
    bars: str = ""  # traits, trainers, and arguments and traits of other options, with which it is invalid
    gives: str = ""  # traits of the case, for `bars` of other options
    commutes: bool = True  # whether another split of a step into batches gives the same numbers
    resumes: bool = True  # whether a run with it can be resumed
    begins: int = 1  # the update from which on weights differ with it

    @property
    def arguments(self) -> dict[str, str]:
        """The text of each argument, by its name."""
        return parse_arguments(self.text)


def parse_arguments(text: str) -> dict[str, str]:
    """Split the text of keyword arguments into one text per argument."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}


LISTS = ("callbacks", "algorithms")
"""Arguments that several options may have; their lists are joined."""


def _rows(texts: Iterable[str], alters: str = "", follows: str = "", **columns: object) -> list[Option]:
    return [Option(text, alters, follows, **columns) for text in texts]  # type: ignore[arg-type]


def _optimizer(call: str) -> str:
    return f"optimizer=lambda parameters: torch.optim.{call.replace('(', '(parameters, ', 1)}"


DATA = [
    *_rows(["eval_batch_size=3"], "rounding", bars="bf16"),
    *_rows(["microbatch_size=2", "microbatch_size=1"], "rounding", bars="batch_norm bf16 loader algorithms rows"),
    *_rows(["microbatch_size='auto'"], "rounding", bars="batch_norm bf16 loader algorithms rows fsdp zero2"),
    *_rows(["microbatch_size=2"], "weights", needs="batch_norm", bars="algorithms batch_1 batch_2"),
    *_rows(["global_batch_size=12"], "weights length", bars="loader shards"),
    *_rows(["global_batch_size={0: 8, '1ep': 16}"], "weights length", needs="divides_8", bars="loader drop_last short",
           gives="growing"),
    *_rows(["shuffle=False"], "weights", needs="map", bars="tasks"),
    *_rows(["drop_last=True"], "drift length", needs="map", bars="global_batch_size"),
    *_rows(["pin_memory=False"], bars="loader"),
    *_rows(["data_collator=Collator()"], bars="loader rows"),
    *_rows(["num_workers=1", "num_workers=2, prefetch_factor=1"], bars="loader", gives="rare"),
    *_rows(["eval_dataset={'first': classes(5), 'second': classes(4)}"], "scores choice", needs="classes fp64"),
    *_rows(["eval_dataset=None"], "evaluations scores choice length", gives="blind", bars="loader"),
    *_rows(["epochs=1"], "length", gives="short"),
    *_rows(["epochs=2.5", "epochs=4", "max_steps=5", "max_steps=7, epochs=None", "max_duration='30sp'",
            "max_duration='2ep'", "epochs=None, max_duration='50sp'"], "length", bars="endless"),
    *_rows(["max_duration='120tok'"], "length", needs="tokens", gives="short"),
]  # fmt: skip
OPTIMIZER = [
    *_rows([f"optimizer='{name}', learning_rate=0.02" for name in (
        "adam", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "asgd", "sgd", "SGD", "torch.optim.Adam",
        "adamw_torch")], "weights"),
    *_rows(["optimizer='sgd', learning_rate=0.02, optimizer_kwargs={'momentum': 0.9, 'nesterov': True}",
            "optimizer_kwargs={'betas': (0.5, 0.9)}"], "weights", bars="own_rate optimizer"),
    *_rows(["optimizer='adafactor'"], "weights", commutes=False, bars="fsdp zero2"),
    *_rows(["optimizer='muon', learning_rate=0.02"], "weights", commutes=False, bars="tied zero2"),
    # it takes signs of gradients, and sizes of its first steps only
    *_rows(["optimizer='rprop', learning_rate=0.02"], "weights", commutes=False,
           bars="fsdp lr_scheduler warmup_steps max_grad_norm weight_decay param_groups grad_reduction"),
    *_rows(map(_optimizer, (
        "SGD(lr=0.05, momentum=0.9)", "SGD(lr=0.05, momentum=0.9, dampening=0.1)",
        "SGD(lr=0.05, momentum=0.9, nesterov=True)", "SGD(lr=0.05, foreach=True)", "SGD(lr=0.05, maximize=True)")),
           "weights", gives="own_rate"),
    # PyTorch has no fused SGD of sharded weights, which the trainer reports
    *_rows([_optimizer("SGD(lr=0.05, momentum=0.5, fused=True)")], "weights", gives="own_rate", bars="fsdp"),
    *_rows(map(_optimizer, (
        "AdamW(lr=0.02, amsgrad=True)", "AdamW(lr=0.02, foreach=True)", "AdamW(lr=torch.tensor(0.02))",
        "AdamW(lr=0.02, fused=True, betas=(0.8, 0.9))",
        "Adam(lr=0.02, weight_decay=0.1)", "Adam(lr=0.02, weight_decay=0.1, decoupled_weight_decay=True)",
        "NAdam(lr=0.02, decoupled_weight_decay=True, weight_decay=0.1)", "RMSprop(lr=0.01, momentum=0.9)",
        "RMSprop(lr=0.01, centered=True)", "Adagrad(lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1)",
        "Adadelta(lr=0.5, foreach=True)", "Adamax(lr=0.02, maximize=True)", "RAdam(lr=0.02, weight_decay=0.1)",
        "ASGD(lr=0.02, t0=4)")), "weights", gives="own_rate"),
    *_rows([_optimizer("LBFGS(lr=0.1, max_iter=2)") + ", max_grad_norm=None"], "weights", commutes=False,
           gives="own_rate closure", bars="microbatch_size algorithms bf16 random autocast param_groups fsdp zero2"),
    *_rows(["weight_decay=0.1", "learning_rate=0.01", "learning_rate=0.1"], "weights", bars="own_rate"),
    *_rows(["param_groups=[{'match': 'bias', 'lr_scale': 0.5}]", "param_groups=[{'match': 'bias', 'lr': 0.003}]",
            "param_groups=[{'match': 'bias', 'weight_decay': 0.2}, {'match': 'weight', 'weight_decay': 0.1}]"],
           "weights", bars="freeze weight_decay"),
    *_rows(["freeze=['bias']", "freeze=['emb|body.0|wpe|^0']"], "weights", bars="param_groups layers"),
]  # fmt: skip
RATE = [
    *_rows(["lr_scheduler='linear'", "lr_scheduler='cosine'", "lr_scheduler='polynomial'",
            "lr_scheduler='wsd', lr_scheduler_kwargs={'decay': '0.5dur'}",
            "lr_scheduler='cosine', lr_scheduler_kwargs={'min_lr_rate': 0.1}, warmup_steps=2",
            "lr_scheduler='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr': 1e-5}, warmup_steps='0.2dur'",
            "lr_scheduler='linear', warmup_steps=0.3"], "weights", "length", bars="endless"),
    *_rows(["lr_scheduler=WSDScheduler('0.4dur', warmup='0.2dur')",
            "lr_scheduler=LinearScheduler() * StepScheduler('2ba', gamma=0.5)",
            "lr_scheduler='linear', scheduler_interval='epoch'"], "weights", "length", bars="endless warmup_steps"),
    *_rows(["lr_scheduler='exponential', lr_scheduler_kwargs={'gamma': 0.8}",
            "lr_scheduler='multistep', lr_scheduler_kwargs={'milestones': ['1ep', '30sp'], 'gamma': 0.5}"],
           "weights", bars="endless"),
    *_rows(["lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2]), "
            "scheduler_interval='epoch'", "lr_scheduler=ExponentialScheduler(0.5, '2ba')",
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)",
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)",
            "lr_scheduler=torch.optim.lr_scheduler.StepLR, lr_scheduler_kwargs={'step_size': 2, 'gamma': 0.5}"],
           "weights", bars="warmup_steps short"),
    *_rows(["lr_scheduler='step', lr_scheduler_kwargs={'step_size': '2ba', 'gamma': 0.5}",
            "lr_scheduler='inverse_sqrt', warmup_steps=1", "warmup_steps=2", "warmup_steps='20sp'"], "weights"),
    *_rows(["lr_scheduler='constant'"]),
    *_rows(["lr_scheduler='reduce_lr_on_plateau', lr_scheduler_kwargs={'patience': 0, 'factor': 0.5}", "lr_scheduler="
            "lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)"],
           "drift", "evaluations scores choice weights", bars="blind warmup_steps"),
    *_rows(["max_grad_norm=0.01"], "weights", bars="closure"), *_rows(["max_grad_norm=None"], "drift"),
    *_rows(["grad_reduction='sum'"], "drift", commutes=False, gives="sum", bars="closure"),
    *_rows(["grad_reduction='per-token-mean'"], needs="tokens"),
]  # fmt: skip
SCORES = [
    *_rows(["loss_fn=torch.nn.CrossEntropyLoss(label_smoothing=0.1)"], "weights scores", needs="classes",
           bars="mixed"),
    *_rows(["loss_fn=torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))"],
           "weights scores", needs="classes fp64", bars="mixed"),
    *_rows(["loss_fn=CrossEntropy()", "loss_fn=torch.nn.CrossEntropyLoss()"], needs="classes"),
    *_rows(["loss_fn=WeightedLosses({'mse': F.mse_loss, 'l1': F.l1_loss}, {'l1': 0.5})"], "weights scores",
           needs="regression"),
    *_rows(["loss_fn=F.l1_loss", "loss_fn=torch.nn.SmoothL1Loss(beta=0.2)"], "weights scores", needs="regression"),
    *_rows(["compute_metrics='accuracy'", "compute_metrics=['accuracy', 'f1_macro']", "sanity=False"], needs="classes"),
    *_rows(["compute_metrics='accuracy', optimization_metric='accuracy'",
            "compute_metrics=['accuracy'], optimization_metric='accuracy', optimization_direction='min'"], "choice",
           needs="classes", bars="eval_dataset"),
    *_rows(["compute_metrics='accuracy', preprocess_logits_for_metrics=lambda logits, labels: logits.argmax"
            "(-1)"], needs="classes"),
    *_rows(["compute_metrics=lambda outputs, labels: {'error': float(abs(outputs - labels).mean())}",
            "compute_metrics=['r2', 'neg_mean_squared_error']"], needs="regression", bars="bf16"),
    *_rows(["patience=1", "patience=1, delta=0.05"], "length", "evaluations scores choice weights", bars="blind"),
    *_rows(["patience=2, eval_steps=1", "patience='3ba', eval_steps=1"], "length evaluations",
           "evaluations scores choice weights", bars="blind"),
    *_rows(["early_stopper=lambda step, score: step >= 4"], "length", "evaluations scores choice weights",
           bars="blind"),
    *_rows(["eval_steps=1", "eval_steps=2", "eval_steps=4", "eval_steps='0.5ep'", "eval_steps='12sp'",
            "eval_steps='1h'", "eval_steps=['1ep', '2ba']", "eval_steps='2ba after 1ep'", "eval_on_start=True",
            "eval_on_start=True, eval_steps=3"], "evaluations", bars="blind"),
]  # fmt: skip
FILES = [
    *_rows(["save_steps=1", "save_steps=2", "save_steps=5", "save_steps='0.5ep'", "save_steps='20sp'",
            "save_steps='1h'", "save_steps=['1ep', '3ba after 2ba']", "log_steps=1",
            "log_steps=['3ba', '20sp after 2ba']", "log_steps=3", "log_steps='1ep'", "log_steps='10sp'",
            "save_total_limit=1", "save_total_limit=0, save_steps=2", "save_total_limit=2, save_steps=1",
            "save_total_limit=1, keep_every=2, save_steps=1", "keep_best=2", "keep_best=3, save_total_limit=1",
            "async_save=True", "async_save=True, save_steps=1", "save_required=True", "consolidate=True",
            "save_frozen=True", "overwrite=True"], "saves"),
    *_rows(["save_only_model=True"], resumes=False), *_rows(["keep_best=0"], "choice", "saves"),
    *_rows(["save_only_model='all_but_last'"]),
    *_rows(["load_best_at_end=False", "load_best_at_end=True"], "choice", bars="blind"),
]  # fmt: skip
RUN = [
    *_rows(["autocast='bf16'"], "weights scores", commutes=False, needs="fp32"),
    *_rows(["dtypes={'parameters': 'fp32', 'inputs': 'fp32', 'buffers': 'fp32'}"], "weights scores", commutes=False,
           needs="fp64 regression", bars="eval_dataset"),
    *_rows(["gradient_checkpointing=True"], needs="blocks"), *_rows(["gradient_checkpointing=True"], needs="gpt2"),
    *_rows(["gradient_checkpointing=['head', 'embed']"], needs="blocks", bars="layers"),
    *_rows(["matmul_precision='highest'", "deterministic=True", "timeout='10m'", "trial_name='trial'",
            "fp16_loss_scale=(65536.0, 1e-4)", "on_nonfinite='warn'"]),
    *_rows(["detect_anomaly=True"], bars="bf16 skips"),
    *_rows(["compile={'backend': 'eager'}"], bars="unit algorithms gradient_checkpointing", gives="rare"),
    *_rows(["seed=7"], "weights", needs="map"),
    *_rows(["loggers='csv'", "loggers=['csv', JsonlLogger('rows.jsonl', every=3)]"]),
    *_rows(["loggers='tensorboard'", "callbacks=[TensorBoardLogger(every=2)]"], bars="tensorboard",
           gives="tensorboard"),
    *_rows([f"callbacks=[{call}]" for call in (
        "Periodic(lambda trainer: {'drawn': torch.randn(1).item()}, every='0.5ep')",
        "Distributions(of='weights', every=2)", "Distributions(of='updates', every=1)",
        "CsvLogger('rows.csv', every=2)", "MemoryMonitor()", "GarbageCollection('2ba')", "TimeLimit('1d')",
        "Trace()", "Trace(every=2)",
        "HookCallback({'on_step_start': lambda trainer: None})")]),
    *_rows(["callbacks=[GradientCheck('2ba')]"], bars="zero2"),
    *_rows(["callbacks=[Throughput()]", "callbacks=[Throughput(window=2)]"], bars="throughput", gives="throughput"),
    *_rows(["callbacks=[EarlyStopping(1)]"], "length", "evaluations scores choice weights", bars="blind patience"),
    *_rows(["callbacks=[HookCallback({'on_step_end': lambda trainer: (trainer.request_evaluate(), trainer.request_save"
            "())})]"], "evaluations", bars="blind"),
    *_rows(["callbacks=[Preview([[5, 6, 7]], every=2, max_new_tokens=3)]"], needs="gpt2"),
]  # fmt: skip
_LAYERS = "layers freeze endless growing closure param_groups short zero2"
_AVERAGES = {"bars": "averages bf16", "gives": "averages"}
_PRUNING: dict[str, Any] = {"bars": "averages closure layers short zero2", "gives": "averages"}
ALGORITHMS = [
    *_rows(["algorithms=[EMA(0.5)]", "algorithms=[EMA()]", "algorithms=[SWA('2ba', every=1)]"], "scores choice",
           **_AVERAGES),
    # at the end of an epoch, an evaluation of its last step comes before the average
    *_rows(["algorithms=[SWA('1ba')]"], "scores choice", "evaluations", bars="averages bf16 short",
           gives="averages"),
    *_rows(["algorithms=[SWA('0.4dur', every=2)]"], "scores choice", "length",
           bars="averages bf16 endless short", gives="averages"),
    *_rows(["algorithms=[SAM(0.1)]"], "weights", bars="microbatch_size closure zero2"),
    *_rows(["algorithms=[SpikeGuard(1e9, every=2)]"], gives="spikes", bars="zero2 skips loader spikes"),
    # a spike is found before a log, an evaluation or a checkpoint, from which the steps after it are made again
    *_rows(["algorithms=[SpikeGuard(0.5, window=8, every=3, limit=99)]"], "drift length", "evaluations saves",
           gives="spikes", bars="zero2 skips spikes"),
    *_rows(["algorithms=[SpikeGuard(0.5, window=8, action='skip')]"], "drift length", gives="spikes",
           bars="zero2 spikes"),
    *_rows(["algorithms=[GradientClipping('value', 0.001)], max_grad_norm=None",
            "algorithms=[GradientClipping('adaptive', 0.001)], max_grad_norm=None"], "weights",
           bars="closure zero2"),
    *_rows(["algorithms=[LabelSmoothing(3, 0.2)]"], "weights", needs="classes"),
    *_rows(["algorithms=[LabelSmoothing(11, 0.2)]"], "weights", needs="tokens", bars="gpt2 singles"),
    *_rows(["algorithms=[LabelSmoothing(5, 0.2)]"], "weights", needs="singles"),
    *_rows(["algorithms=[LabelSmoothing(40, 0.2)]"], "weights", needs="gpt2", bars="rows"),
    *_rows(["algorithms=[MixUp(3, alpha=1.0)]"], "weights", needs="classes divides_8",
           bars="microbatch_size mixed loader batch_1", gives="mixed"),
    *_rows(["algorithms=[SeqLengthWarmup(9, 4, duration=0.6, step_size=1)]",
            "algorithms=[SeqLengthWarmup(6, 2, duration=1.0, step_size=2)]"], "weights", "length", needs="tokens",
           bars="sum rows endless"),
    *_rows(["algorithms=[MagnitudePruning(0.5, end=4, every=1)]"], "weights", "length", begins=2, **_PRUNING),
    *_rows(["algorithms=[MagnitudePruning(0.3, end=3, every=2, match=['weight'], scope='global')]"], "weights",
           "length", begins=3, **_PRUNING),
    *_rows(["algorithms=[StochasticDepth(['blocks.0', 'blocks.1'], 0.4)]",
            "algorithms=[StochasticDepth([r'blocks\\.\\d'], 0.5, distribution='uniform')]"], "weights", needs="blocks",
           bars="gradient_checkpointing"),
    *_rows(["algorithms=[StraightThrough(lambda weight: (weight * 8).round() / 8)]",
            "algorithms=[StraightThrough(lambda weight: (weight * 8).floor() / 8, match=['weight'])]"],
           "weights scores", bars="averages bf16 microbatch_size closure compile zero2", gives="averages"),
    # the epochs of a run must freeze different layers, of which some models have too few
    *_rows(["algorithms=[LayerFreezing(0.0)]", "algorithms=[GradualUnfreezing(0.8)]"], "drift", "length",
           gives="layers", bars=f"tied unit singles {_LAYERS}"),
    *_rows(["algorithms=[LayerFreezing(0.2, freeze_level=0.8)]"], "drift", "length", needs="gpt2", gives="layers",
           bars=_LAYERS),
]  # fmt: skip
TABLE = (*DATA, *OPTIMIZER, *RATE, *SCORES, *FILES, *RUN, *ALGORITHMS)


def is_valid(trainer: str, kind: str, batch_size: int, options: Sequence[Option]) -> bool:
    """Return whether a trainer accepts these options together."""
    traits = KINDS[kind].traits.split()
    if "batch_norm" in traits and trainer in BACKENDS and batch_size < 4:
        return False  # a batch of a single row would be left over
    if (trainer == "zero2" and "fp32" not in traits) or (trainer == "fsdp" and kind == "scalar"):
        return False  # DeepSpeed trains in fp32, and PyTorch does not shard scalar parameters
    names = [name for option in options for name in option.arguments if name not in LISTS]
    names += [name for name in parse_arguments(KINDS[kind].arguments) if name != "loss_fn"]
    for option in options:
        traits = {trainer, *KINDS[kind].traits.split(), f"batch_{batch_size}"}
        traits |= {"divides_8"} if 8 % batch_size == 0 else set()
        for other in options:
            if other is not option:
                traits |= {*other.gives.split(), *other.arguments}
        if not set(option.needs.split()) <= traits or set(option.bars.split()) & traits:
            return False
    return len({*names}) == len(names)


def altered_aspects(option: Option, rest: Iterable[Option]) -> set[str]:
    """Return the aspects of a run that may differ by an option, directly or through the others."""
    aspects, rest = set(option.alters.split()), list(rest)
    for _ in rest:
        for other in rest:
            if aspects & set(other.follows.split()) or ("rounding" in aspects and not other.commutes):
                aspects |= {*other.alters.split()} | (set() if other.commutes else {"drift"})
        if "drift" in aspects:
            aspects.add("weights")
    return aspects
