"""Names that ``Trainer`` does not have, and which of its own are meant.

Many are those of other trainers.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import ParamSpec, TypeVar

from helios.checkpoint.options import CheckpointStore
from helios.errors import ArgumentTypeError
from helios.start.options import ROWS

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_OF_OTHER_TRAINERS = """
epochs num_epochs n_epochs num_train_epochs: max_epochs
num_steps num_iterations max_iters steps: max_steps
max_time: plugins=[TimeLimit(...)]
accelerator device devices num_gpus use_gpu: use_cpu and gpus; nproc is the number of processes
strategy num_nodes world_size num_processes ddp: nproc, num_replicas, sharding; or torchrun
fsdp: sharding="full"
callbacks callback hooks: plugins
logger loggers report_to: plugins=[CSVLogger(...), WandbLogger(...)], or enable_tensorboard
logging_dir: run_path for TensorBoard, log_path for log files
default_root_dir output_dir save_dir checkpoint_dir: chkpt_root
accumulate_grad_batches gradient_accumulation_steps: accumulation_steps
gradient_clip_val max_grad_norm grad_clip: clip_norm
gradient_clip_algorithm: clip_norm or clip_value
check_val_every_n_epoch val_check_interval eval_steps eval_frequency val_frequency: valid_frequency
save_steps save_frequency save_every: chkpt_frequency
enable_checkpointing: chkpt_root
save_total_limit: store=CheckpointStore(keep_last=...)
save_top_k monitor load_best_model_at_end keep_best: store=CheckpointStore(keep_best=KeepBest(...))
log_every_n_steps logging_steps log_frequency: print_frequency
limit_train_batches limit_val_batches overfit_batches: batch_limits={Phase.TRAINING: 10, ...}
limit_test_batches limit_predict_batches: batch_limits={Phase.TRAINING: 10, ...}
fast_dev_run: batch_limits={Phase.TRAINING: 10, ...} and max_epochs=1
num_sanity_val_steps: sanity_steps
deterministic: enable_deterministic
benchmark: enable_cudnn_benchmark
seed: random_seed
patience: early_stop_cycles, or plugins=[EarlyStopping(...)]
profiler: plugins=[Profiler(...)]
detect_anomaly: plugins=[NaNGuard()]
fp16 bf16 amp mixed_precision: precision="bf16" or "fp16"
resume_from_checkpoint ckpt_path checkpoint: resume=<path>; without it, a run continues by itself
enable_model_summary: print_banner
name: run_name
config hparams args: params
model datamodule train_dataset train_dataloaders: trainer.fit(model, datamodule)
batch_size num_workers: DataLoaderParams(...) in setup() of the data module
optimizer optimizers lr learning_rate: setup() of the model, where its optimizers are made
"""

MEANT = {
    **{each.name: f"store=CheckpointStore({each.name}=...)" for each in fields(CheckpointStore)},
    **{
        name: meant
        for names, meant in (line.split(": ", 1) for line in _OF_OTHER_TRAINERS.split("\n")[1:-1])
        for name in names.split()
    },
}
"""What is meant by names that ``Trainer`` does not have."""


def with_known_arguments(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a constructor of the trainer that says which argument an unknown one may mean."""

    @functools.wraps(call)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        check_names(options)
        return call(*args, **options)

    return run


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are no arguments of the trainer.

    Raises:
        ArgumentTypeError: for these.
    """
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise ArgumentTypeError("\n".join(map(_refuse, unknown)))


def _refuse(name: str) -> str:
    names = MEANT | {known: known for known in ROWS}
    (meant, *_) = [names[each] for each in difflib.get_close_matches(name, names, n=1)] or [""]
    hint = f"Did you mean {meant}?" if meant else "help(helios.Trainer) lists the arguments."
    return f"Trainer() has no argument {name!r}. {hint}"
