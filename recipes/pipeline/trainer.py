"""The trainer: transformers' own, or optimum-habana's on HPU, with one mixin that holds what is ours.

Ours are: the loss's denominator (targets of the whole step, over ranks and micro-batches), evaluation by sums, the
adapter-only save at every ZeRO stage, no empty optimizer group, a stop at the first NaN, and lazy graph breaks on torch's
engine. `training_arguments` must be made before the model: they register ZeRO-3 and patch transformers on HPU.
"""

from __future__ import annotations

import copy
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.checkpoint import checkpoint  # now: optimum-habana exchanges it in torch's module
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from recipes.pipeline.adapter import save_adapter
from recipes.pipeline.batches import IGNORED
from recipes.pipeline.config import Batching, Dtype, InputError, LoraRecipe, Strategy
from recipes.pipeline.data import Data, blank_rows
from recipes.pipeline.memory_curve import MemoryWatch, step_shape
from recipes.pipeline.metrics import EvaluationSums, Throughput, count_targets, memory_of_all_ranks, target_sums
from recipes.pipeline.progress import ProgressBar, StepLog
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.sampler import EpochSampler
from recipes.pipeline.trace import Tracer

# An index that selects no position: the loss needs no logits
NO_LOGITS = torch.empty(0, dtype=torch.long)
LAYOUT_FILE = "parallel_layout.json"


def training_arguments(cfg: LoraRecipe, runtime: Runtime, folder: Path) -> TrainingArguments:
    """TrainingArguments, or GaudiTrainingArguments on HPU."""
    options = trainer_options(cfg, runtime, folder)
    if runtime.kind == "hpu":
        return _optimum_habana().GaudiTrainingArguments(**options, **gaudi_options(cfg, runtime.lazy))
    return TrainingArguments(**options, use_cpu=runtime.kind == "cpu")


def _optimum_habana() -> Any:
    try:
        import optimum.habana
    except IndexError as error:  # it reads Gaudi's version off the first line of `pip list | grep habana-torch-plugin`
        raise InputError(
            "optimum-habana cannot be imported: the `pip` of this PATH does not list habana-torch-plugin; put the"
            " environment's own pip first on the PATH (source .venv/bin/activate)"
        ) from error
    except ImportError as error:
        raise InputError(f"optimum-habana cannot be imported ({error}); pip install optimum-habana==1.21.2") from error
    return optimum.habana


def trainer_options(cfg: LoraRecipe, runtime: Runtime, folder: Path) -> dict[str, Any]:
    """What both kinds of arguments are made of."""
    train = cfg.train
    same = (
        "max_steps num_train_epochs per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps"
        " learning_rate warmup_ratio warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm"
        " logging_steps eval_delay save_steps save_total_limit load_best_model_at_end gradient_checkpointing"
        " dataloader_num_workers dataloader_drop_last do_train do_eval"
    )
    checkpointing = (
        {"use_reentrant": train.gradient_checkpointing_use_reentrant} if train.gradient_checkpointing else None
    )
    return {
        **{name: getattr(train, name) for name in same.split()},
        "output_dir": str(folder),
        "lr_scheduler_type": train.lr_scheduler_type.name,
        "eval_strategy": train.eval_strategy.name if train.do_eval and train.do_train else "no",
        "eval_steps": train.eval_steps,
        "eval_on_start": train.eval_on_start and train.do_eval and train.do_train and not train.resume_from_checkpoint,
        "save_strategy": train.save_strategy.name,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "gradient_checkpointing_kwargs": checkpointing,
        "group_by_length": train.group_by_length
        and cfg.data.batching is Batching.padded
        and not cfg.data.pad_to_max_length,
        "length_column_name": "length",
        "optim": "adamw_torch",
        "bf16": cfg.model.dtype is Dtype.bfloat16 and (bool(cfg.deepspeed) or runtime.kind == "hpu"),
        "deepspeed": deepspeed_config(cfg) if uses_deepspeed(cfg) else None,
        "torch_compile": cfg.runtime.compile,
        "torch_compile_backend": cfg.runtime.compile_backend if cfg.runtime.compile else None,
        "report_to": ["tensorboard"] if train.tensorboard else [],
        "logging_dir": str(folder / "tensorboard"),
        "seed": cfg.seed,
        "logging_nan_inf_filter": False,  # it would show a NaN step as a plausible loss
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "label_names": ["labels"],
        "dataloader_pin_memory": runtime.kind == "cuda",
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,  # ProgressBar shows what a reader wants
        "log_level": "info" if cfg.debug else "error",
    }


def gaudi_options(cfg: LoraRecipe, lazy: bool) -> dict[str, Any]:
    """What GaudiTrainingArguments take on top. Attention and its softmax are not here: modeling/ binds them itself."""
    return {
        "use_habana": True,
        "use_lazy_mode": lazy,
        "pipelining_fwd_bwd": cfg.runtime.pipelining_fwd_bwd,
        "use_hpu_graphs_for_inference": cfg.runtime.use_hpu_graphs_for_inference,
        "throughput_warmup_steps": cfg.train.throughput_warmup_steps,
    }


def uses_deepspeed(cfg: LoraRecipe) -> bool:
    """Evaluation alone has optimizer states to cut only under ZeRO-3; below it, plain data parallelism is the same."""
    return bool(cfg.deepspeed) and (cfg.train.do_train or zero_stage(cfg) == 3)


def zero_stage(cfg: LoraRecipe) -> int:
    return (cfg.deepspeed.get("zero_optimization") or {}).get("stage", 0)


def deepspeed_config(cfg: LoraRecipe) -> dict[str, Any]:
    """DeepSpeed's configuration with what train and model already say filled in."""
    filled = copy.deepcopy(cfg.deepspeed)
    filled.get("zero_optimization", {}).pop(
        "leaf_module", None
    )  # set by `gather_whole_layers`, older releases lack the key
    filled.setdefault("train_batch_size", "auto")
    filled.setdefault("train_micro_batch_size_per_gpu", "auto")
    filled.setdefault("gradient_accumulation_steps", "auto")
    filled.setdefault("gradient_clipping", cfg.train.max_grad_norm)
    filled.setdefault("bf16", {"enabled": cfg.model.dtype is Dtype.bfloat16})
    return filled


def gather_whole_layers(cfg: LoraRecipe, model: torch.nn.Module) -> None:
    """ZeRO-3 fetches the classes of zero_optimization.leaf_module whole: one collective, one graph break, a layer."""
    wanted = (cfg.deepspeed.get("zero_optimization", {}).get("leaf_module") or {}).get("classes", [])
    if not wanted or not is_deepspeed_zero3_enabled():
        return
    from deepspeed.utils import set_z3_leaf_modules

    known = {type(module).__name__: type(module) for module in model.modules()}
    for name in wanted:
        if name not in known:
            raise InputError(
                f"deepspeed.zero_optimization.leaf_module.classes: {name} is no class of this model's modules;"
                " Llama's layer is LlamaDecoderLayer"
            )
        set_z3_leaf_modules(model, [known[name]])
    # Such a layer's gradients are reduced in a hook of its input's gradient: the first layer's input must have one
    model.enable_input_require_grads()


def build_trainer(
    cfg: LoraRecipe,
    runtime: Runtime,
    arguments: TrainingArguments,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
) -> Trainer:
    """The trainer of this device over `data`, with our mixin and callbacks."""
    base, extra = Trainer, {}
    if runtime.kind == "hpu":
        habana = _optimum_habana()
        base = habana.GaudiTrainer
        fused = {name: getattr(cfg.runtime, name) for name in ("use_fused_adam", "use_fused_clip_norm")}
        extra = {"gaudi_config": habana.GaudiConfig(**fused)}
    gather_whole_layers(cfg, model)
    trainer_class = type(f"Lora{base.__name__}", (LoraTrainerMixin, base), {})
    eval_rows = cfg.train.per_device_eval_batch_size * runtime.world_size
    train_rows = 1 if cfg.train.dataloader_drop_last else cfg.train.per_device_train_batch_size * runtime.world_size
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=blank_rows(data.train, train_rows) if cfg.train.do_train else None,
        eval_dataset=blank_rows(_by_length(data.eval), eval_rows) if cfg.train.do_eval else None,
        data_collator=data.collator,
        processing_class=tokenizer,
        **extra,
    )
    trainer.prepare(cfg, runtime, data)
    return trainer


def _by_length(rows: datasets.Dataset) -> datasets.Dataset:
    # Like lengths share a batch: less padding; the figures don't depend on it
    return rows.select(sorted(range(len(rows)), key=rows["length"].__getitem__, reverse=True))


class LoraTrainerMixin:
    """In front of Trainer or GaudiTrainer. `prepare` must be called once before use."""

    def prepare(self, cfg: LoraRecipe, runtime: Runtime, data: Data) -> None:
        self.cfg, self.runtime = cfg, runtime
        self.train_samples, self.eval_samples = len(data.train), len(data.eval)  # without the blank rows
        self.sums = EvaluationSums()
        self.throughput = Throughput(runtime, cfg.train.throughput_warmup_steps)
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.first_bad_step = torch.tensor(-1, device=runtime.device)
        self.loss_since_log = torch.zeros((), device=runtime.device)
        self.logged_step = 0
        self.step_samples: torch.Tensor | int = 0
        self.step_tokens: torch.Tensor | int = 0
        self.step_shape: tuple[int, int, int] | None = None
        for callback in list(self.callback_handler.callbacks):
            if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
                self.remove_callback(callback)
        self.add_callback(StepLog(self))
        self.add_callback(ProgressBar(self))
        self.memory = MemoryWatch(self, cfg)
        if cfg.memory_curve:
            self.add_callback(self.memory)
        if cfg.trace_steps and runtime.is_main:
            self.add_callback(Tracer(Path(self.args.output_dir), cfg.trace_steps))

    # Loss: the mean over the targets of the whole optimizer step

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | None]:
        """The micro-batches of one optimizer step and their target count over all ranks (0-d tensor on `device`)."""
        batches = []
        for _ in range(num_batches):
            if (batch := next(epoch_iterator, None)) is None:
                break
            batches.append(batch)
        if not batches:
            return batches, None
        self.step_samples = sum(
            batch["labels"].ne(IGNORED).any(-1).sum() for batch in batches
        )  # blank rows don't count
        self.step_tokens = sum(batch["attention_mask"].sum() for batch in batches)
        if self.runtime.kind == "cpu":
            self.step_shape = step_shape(batches)
        targets = torch.stack([count_targets(batch["labels"]) for batch in batches]).sum().to(device)
        return batches, self.accelerator.gather(targets).sum()

    get_batch_samples_transformers = get_batch_samples  # GaudiTrainer's name for it

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:  # evaluation
            return self._evaluation_loss(model, inputs)
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        return loss * self.accelerator.num_processes  # data parallelism divides the summed gradients by it

    def _evaluation_loss(self, model: Any, inputs: dict) -> tuple[torch.Tensor, Any]:
        if self.cfg.model.implementation.name == "vendored":
            outputs = model(**inputs, logits_to_keep=NO_LOGITS.to(self.runtime.device))
            sums = outputs.nats, outputs.targets, outputs.correct
        else:
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            sums = target_sums(outputs.logits, inputs["labels"])
        self.sums.add(*sums)
        if self.runtime.kind == "lazy":
            self.runtime.mark_step()
        return sums[0], {"loss": sums[0]}

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        unseen_and_bad = (self.first_bad_step < 0) & ~torch.isfinite(loss)
        # Sent as data: as a Python number it would be a constant of the lazy graph, and each step a graph of its own
        step = torch.tensor(self.state.global_step + 1).to(loss.device)
        self.first_bad_step = torch.where(unseen_and_bad, step, self.first_bad_step)
        self.loss_since_log = self.loss_since_log + loss
        if self.runtime.kind == "lazy":
            self.runtime.mark_step()
        return loss

    def _maybe_log_save_evaluate(self, loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(grad_norm, torch.Tensor):  # optimum-habana logs the fused clipping's shape (1,) only
            grad_norm = grad_norm.reshape(1)
        super()._maybe_log_save_evaluate(loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # the base has rounded it to four digits, too few to compare two runs
            steps = self.state.global_step - self.logged_step
            logs["loss"] = self.accelerator.gather(self.loss_since_log.reshape(1)).mean().item() / steps
            self.loss_since_log, self.logged_step = torch.zeros_like(self.loss_since_log), self.state.global_step
        super().log(logs, start_time)
        if not math.isfinite(logs.get("loss", 0.0)):
            raise InputError(self._bad_loss(logs["loss"]))

    def _bad_loss(self, loss: float) -> str:
        step = torch.where(self.first_bad_step < 0, 2**30, self.first_bad_step)
        step = int(self.accelerator.gather(step.reshape(1)).min())
        return (
            f"training loss is {loss} at step {step}: stopped; lower train.learning_rate, or look at the records of that step."
            " Finished checkpoints are kept"
        )

    # Evaluation: sums over all batches and ranks, divided once

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.throughput.pause()
        metrics = super().evaluate(*args, **kwargs)
        self.evaluations.append((self.state.global_step, metrics))
        self.throughput.start()
        return metrics

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
        rows = len(self.train_dataset)
        lengths = list(self.train_dataset["length"]) if self.args.group_by_length else None
        group = self.args.per_device_train_batch_size * self.runtime.world_size
        return EpochSampler(self.train_samples, rows - self.train_samples, self.args.seed, lengths, group)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(
            eval_dataset
        )  # the base draws a new order each time when grouping by length

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.sums = EvaluationSums()
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics.update(self.sums.result(self.runtime), eval_samples=self.eval_samples)
        return output._replace(num_samples=self.eval_samples)

    # Optimizer and checkpoints

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        # A resumed run's base has put the checkpoint's rows for each rank in place of the configured ones: with another
        # number of ranks that is another step, without a word
        return super()._inner_training_loop(self.args.train_batch_size, *args, **kwargs)

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        # Called after checkpointing was switched on. In lazy mode without DeepSpeed optimum-habana puts a checkpoint of its
        # own in place of torch's: the same without re-entry, but its call misses an argument that torch has had since 2.9.
        if training and self.runtime.kind == "hpu" and self.args.gradient_checkpointing and not self.args.deepspeed:
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        return super()._wrap_model(model, training, dataloader)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """As the base's, less empty parameter groups: DeepSpeed drops those after the schedule has counted them."""
        optimizer = super().create_optimizer()
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The adapter alone, whole at every ZeRO stage. Collective."""
        self.throughput.pause()
        save_adapter(self.accelerator.unwrap_model(self.model), Path(output_dir or self.args.output_dir))
        self.throughput.start()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.throughput.pause()
        super()._save_checkpoint(*args, **kwargs)
        if self.runtime.is_main:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            layout = {"world_size": self.runtime.world_size, "zero_stage": self._zero_stage()}
            (folder / LAYOUT_FILE).write_text(json.dumps(layout), encoding="utf-8")
        self.throughput.start()

    def _zero_stage(self) -> int | None:
        return zero_stage(self.cfg) if self.is_deepspeed_enabled else None


def find_checkpoint(cfg: LoraRecipe, runtime: Runtime, folder: Path) -> Path | None:
    """The checkpoint to go on from, checked. Raises InputError if it is unfinished or was cut for another layout."""
    wanted = cfg.train.resume_from_checkpoint
    if wanted is None:
        return None
    found = _last_finished(folder) if wanted == "last" else Path(wanted)
    if found is None:
        raise InputError(
            f"train.resume_from_checkpoint=last: no finished checkpoint in {folder}; set hydra.run.dir to the run's folder"
        )
    if not _finished(found):
        raise InputError(
            f"train.resume_from_checkpoint={found}: not a finished checkpoint (trainer_state.json is missing or cut short)"
        )
    layout = json.loads((found / LAYOUT_FILE).read_text()) if (found / LAYOUT_FILE).exists() else {}
    stage = zero_stage(cfg) if cfg.deepspeed else None
    for name, now in {"world_size": runtime.world_size, "zero_stage": stage}.items():
        if layout and layout[name] != now and (cfg.deepspeed or layout["zero_stage"] is not None):
            raise InputError(
                f"{found} was saved with {name} {layout[name]}, this run has {now}: DeepSpeed's states are cut for that;"
                f" use the same, or start anew from its weights: adapter.path={found}"
            )
    return found


def _last_finished(folder: Path) -> Path | None:
    numbered = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdigit() and _finished(path)]
    return max(numbered, key=lambda path: int(path.name.split("-")[1]), default=None)


def _finished(checkpoint: Path) -> bool:
    # The trainer writes this file last
    try:
        return "global_step" in json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def run(cfg: LoraRecipe, runtime: Runtime, trainer: Trainer, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and evaluate as configured, save the adapter. Collective; returns the figures of all ranks together."""
    results: dict[str, Any] = {}
    folder = Path(trainer.args.output_dir)
    if cfg.train.do_train:
        if checkpoint is not None and _nothing_left(trainer, checkpoint):
            raise InputError(
                f"{checkpoint} has already reached the last step; raise train.max_steps or train.num_train_epochs to go on"
            )
        began = time.perf_counter()
        trainer.throughput.start()
        output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.throughput.pause()
        results |= output.metrics | {"train_runtime": round(time.perf_counter() - began, 4)}
        results |= {"global_step": output.global_step} | trainer.throughput.result()
        save_adapter(trainer.accelerator.unwrap_model(trainer.model), folder / "adapter", trainer.processing_class)
        results |= trainer.memory.result(folder)
    if cfg.train.do_eval:
        results |= _final_evaluation(cfg, trainer)
    return results | memory_of_all_ranks(runtime)


def _final_evaluation(cfg: LoraRecipe, trainer: Trainer) -> dict[str, Any]:
    before = next((figures for step, figures in trainer.evaluations if step == 0), None)
    last_step, metrics = trainer.evaluations[-1] if trainer.evaluations else (-1, {})
    if last_step != trainer.state.global_step or cfg.train.load_best_model_at_end or not cfg.train.do_train:
        metrics = trainer.evaluate()
    if cfg.train.do_train and before is not None:
        metrics = metrics | {"eval_loss_before": before["eval_loss"], "perplexity_before": before["perplexity"]}
    return metrics


def _nothing_left(trainer: Trainer, checkpoint: Path) -> bool:
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    steps = trainer.args.max_steps
    if steps <= 0:
        batches = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
        steps = math.ceil(trainer.args.num_train_epochs * batches)
    return state["global_step"] >= steps


__all__ = [
    "Strategy",
    "build_trainer",
    "find_checkpoint",
    "gaudi_options",
    "run",
    "trainer_options",
    "training_arguments",
]
