"""A model and its ranks ready to generate: ZeRO-3, tensor parallel, or a copy on each rank."""

from __future__ import annotations

import copy
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from recipes.pipeline import questions
from recipes.pipeline.config import Dtype, GenerateRecipe
from recipes.pipeline.generation import Generator, end_ids
from recipes.pipeline.ranks import Ranks
from recipes.pipeline.room import planned_rows
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.tensor_parallel import connect

_registered: list[HfDeepSpeedConfig] = []  # transformers keeps a weak reference only


def uses_zero3(cfg: GenerateRecipe) -> bool:
    """Lower stages cut what only training has: then each rank holds the model."""
    return (cfg.deepspeed.get("zero_optimization") or {}).get("stage") == 3


def inference_config(cfg: GenerateRecipe) -> dict[str, Any]:
    """DeepSpeed's configuration for forwards only."""
    zero = {k: v for k, v in cfg.deepspeed["zero_optimization"].items() if k != "offload_optimizer"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and without meaning here
        "steps_per_print": cfg.deepspeed.get("steps_per_print", 1000000),
        "bf16": {"enabled": cfg.model.dtype is Dtype.bfloat16},
        "zero_optimization": copy.deepcopy(zero),
    }


def register(cfg: GenerateRecipe) -> None:
    """Make weights be cut over the ranks while they are read, where ZeRO-3 is asked for."""
    if uses_zero3(cfg):
        _registered[:] = [HfDeepSpeedConfig(inference_config(cfg))]


def distribute(cfg: GenerateRecipe, model: nn.Module, runtime: Runtime) -> nn.Module:
    """The model on its device, under ZeRO-3 with the hooks that gather weights."""
    model.requires_grad_(False)
    if cfg.generate.tensor_parallel > 1:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        return connect(model.to(runtime.device), base.shares)
    if not uses_zero3(cfg):
        return model.to(runtime.device)
    import deepspeed

    return deepspeed.initialize(model=model, config=inference_config(cfg))[0].module


def generator(cfg: GenerateRecipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase, runtime: Runtime) -> Generator:
    """Everything that decodes, with the end tokens of model and template."""
    ends = questions.ends(cfg, tokenizer, end_ids(model, tokenizer))
    ranks = Ranks.of(runtime, cfg.generate, model)
    return Generator(
        model, tokenizer, cfg.generate, runtime, ends, cfg.runtime, ranks,
        planned=lambda longest: planned_rows(cfg, runtime, ranks, longest),
    )  # fmt: skip
