"""Names that ``Trainer`` does not have, and which of its own are meant.

Many are those of other trainers.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import fields
from typing import ParamSpec, TypeVar

from helios.checkpoint.options import CheckpointStore
from helios.core.utils import read_signature
from helios.errors import ArgumentTypeError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_EPOCHS = "total_steps, which counts epochs by default"
_STEPS = 'total_steps with train_unit="iteration"'
_DEVICES = "use_cpu and gpus; nproc is the number of processes"
_PROCESSES = "nproc for the processes, num_replicas, sharding; or start the script with torchrun"
_ROOT = "chkpt_root"
_CLIP = "clip_norm"
_LIMITS = "batch_limits={Phase.TRAINING: 10, ...}"
_LOGGERS = "plugins=[CSVLogger(...), WandbLogger(...)], or enable_tensorboard with run_path"
_RESUME = "resume=<path>; by default a run continues from its newest checkpoint"
_BEST = 'store=CheckpointStore(keep_best=KeepBest(1, "loss", mode="min"))'
_HERE = "trainer.fit(model, datamodule)"
_OF_DATA = "DataLoaderParams(...) in setup() of the data module"
_OF_MODEL = "setup() of the model, where its optimizers are made"

MEANT = {
    **dict.fromkeys(
        ("max_epochs", "epochs", "num_epochs", "n_epochs", "num_train_epochs"), _EPOCHS
    ),
    **dict.fromkeys(("max_steps", "num_steps", "num_iterations", "max_iters", "steps"), _STEPS),
    "max_time": "plugins=[TimeLimit(...)]",
    **dict.fromkeys(("accelerator", "device", "devices", "num_gpus", "use_gpu"), _DEVICES),
    **dict.fromkeys(("strategy", "num_nodes", "world_size", "num_processes", "ddp"), _PROCESSES),
    "fsdp": 'sharding="full"',
    **dict.fromkeys(("callbacks", "callback", "hooks"), "plugins"),
    **dict.fromkeys(("logger", "loggers", "report_to"), _LOGGERS),
    "logging_dir": "run_path for TensorBoard, log_path for log files",
    **dict.fromkeys(("default_root_dir", "output_dir", "save_dir", "checkpoint_dir"), _ROOT),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps"), "accumulation_steps"
    ),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "grad_clip"), _CLIP),
    "gradient_clip_algorithm": "clip_norm or clip_value",
    **dict.fromkeys(("check_val_every_n_epoch", "val_check_interval"), "valid_frequency"),
    **dict.fromkeys(("eval_steps", "eval_frequency", "val_frequency"), "valid_frequency"),
    **dict.fromkeys(("save_steps", "save_frequency", "save_every"), "chkpt_frequency"),
    "enable_checkpointing": "chkpt_root and chkpt_frequency, which are off by default",
    "save_total_limit": "store=CheckpointStore(keep_last=...)",
    **dict.fromkeys(("save_top_k", "monitor", "load_best_model_at_end"), _BEST),
    **{each.name: f"store=CheckpointStore({each.name}=...)" for each in fields(CheckpointStore)},
    "keep_best": _BEST,
    **dict.fromkeys(("log_every_n_steps", "logging_steps", "log_frequency"), "print_frequency"),
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "overfit_batches"), _LIMITS),
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), _LIMITS),
    "fast_dev_run": f"{_LIMITS} and total_steps=1",
    "num_sanity_val_steps": "sanity_steps",
    "deterministic": "enable_deterministic",
    "benchmark": "enable_cudnn_benchmark",
    "seed": "random_seed",
    "patience": "early_stop_cycles, or plugins=[EarlyStopping(...)]",
    "profiler": "plugins=[Profiler(...)]",
    "detect_anomaly": "plugins=[NaNGuard()]",
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed_precision"), 'precision="bf16" or "fp16"'),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "checkpoint"), _RESUME),
    "enable_model_summary": "print_banner",
    "name": "run_name",
    **dict.fromkeys(("config", "hparams", "args"), "params"),
    **dict.fromkeys(("model", "datamodule", "train_dataset", "train_dataloaders"), _HERE),
    **dict.fromkeys(("batch_size", "num_workers"), _OF_DATA),
    **dict.fromkeys(("optimizer", "optimizers", "lr", "learning_rate"), _OF_MODEL),
}
"""What is meant by names that ``Trainer`` does not have."""


def with_known_arguments(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a constructor of the trainer that says which argument an unknown one may mean."""
    known = list(read_signature(call).parameters)

    @functools.wraps(call)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ArgumentTypeError("\n".join(_refuse(name, known) for name in unknown))
        return call(*args, **options)

    return run


def _refuse(name: str, known: list[str]) -> str:
    names = dict(zip(known, known, strict=True)) | MEANT
    (meant, *_) = [names[each] for each in difflib.get_close_matches(name, names, n=1)] or [""]
    hint = f"Did you mean {meant}?" if meant else "help(helios.Trainer) lists the arguments."
    return f"Trainer() has no argument {name!r}. {hint}"
