"""What can be refused or foretold before hours are spent. Reads configuration files and device nodes; loads no weights."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pipeline.config import GenerateRecipe, InputError, LoraRecipe
from recipes.pipeline.runtime import cards, environment, hpu_cards, hpu_installed, without_effect

if TYPE_CHECKING:
    from transformers import LlamaConfig

EXTENSIONS = (".json", ".jsonl", ".csv", ".parquet")


def preflight(cfg: LoraRecipe) -> None:
    """Raise InputError for what cannot work on this machine with these ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = cfg.runtime.cards
    if problems := missing_here(cfg, world_size):
        raise InputError(f"{'; '.join(problems)}. Launch: {launch_command(cfg, [])}. The plan: dry_run=true")
    if wanted and world_size != wanted:
        raise InputError(f"runtime.cards={wanted} but {world_size} rank(s) run. Launch: {launch_command(cfg, [])}")
    if isinstance(cfg, GenerateRecipe):
        return check_groups(cfg, world_size)
    check_batch_sizes(cfg, world_size)


def check_groups(cfg: GenerateRecipe, world_size: int) -> None:
    """Raises InputError where ranks cannot be split into groups that share a model."""
    if world_size % (shared := cfg.generate.tensor_parallel):
        raise InputError(
            f"generate.tensor_parallel={shared} does not divide {world_size} rank(s)."
            f" Launch: {launch_command(cfg, [], max(shared, world_size // shared * shared))}"
        )


def missing_here(cfg: LoraRecipe, world_size: int) -> list[str]:
    """What this machine lacks for the run, one short phrase each."""
    problems = []
    kind = cfg.runtime.device.name
    if kind == "hpu" and not hpu_installed():
        problems.append("no Gaudi software here (habana_frameworks is not installed)")
    if kind == "hpu" and hpu_cards() < min(cfg.runtime.cards or 1, _local_ranks(world_size, cfg)):
        problems.append(f"{hpu_cards()} Gaudi cards here, {cfg.runtime.cards or 1} needed")
    if kind == "cuda" and (found := cards("cuda")) < _local_ranks(world_size, cfg):
        problems.append(f"{found} CUDA cards here, {_local_ranks(world_size, cfg)} needed")
    if kind == "auto" and cfg.runtime.cards and not (hpu_installed() and hpu_cards()) and not cards("cuda"):
        problems.append(f"no accelerator here, {cfg.runtime.cards} cards needed")
    if kind == "lazy" and world_size > 1:
        problems.append("torch's lazy engine runs in one process")
    return problems


def _local_ranks(world_size: int, cfg: LoraRecipe) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", cfg.runtime.cards or world_size))


def check_batch_sizes(cfg: LoraRecipe, world_size: int) -> None:
    """DeepSpeed's three batch numbers, where its file gives any, against train's. Raises InputError naming the factors."""
    micro, steps = cfg.train.per_device_train_batch_size, cfg.train.gradient_accumulation_steps
    ours = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * world_size,
    }
    for name, value in ours.items():
        given = cfg.deepspeed.get(name, "auto")
        if given not in ("auto", value):
            raise InputError(
                f"deepspeed.{name}={given}, but train gives {value}: train_batch_size {ours['train_batch_size']} ="
                f" per_device_train_batch_size {micro} x gradient_accumulation_steps {steps} x {world_size} ranks;"
                f" leave deepspeed.{name} out"
            )


def launch_command(cfg: LoraRecipe, arguments: list[str], ranks: int | None = None) -> str:
    """The command that starts this configuration on its cards."""
    import sys

    own = arguments or [a for a in sys.argv[1:] if not a.lower().startswith("dry_run")]
    ranks = ranks or cfg.runtime.cards or int(os.environ.get("WORLD_SIZE", "1"))
    script = "recipes/generate.py" if isinstance(cfg, GenerateRecipe) else "recipes/lora.py"
    if ranks == 1 and not cfg.deepspeed:
        return shlex.join(["python", script, *own])
    engine = ["--use_deepspeed"] if cfg.deepspeed else []
    return shlex.join(["python", "scripts/gaudi_spawn.py", "--world_size", str(ranks), *engine, script, *own])


def dry_run(cfg: LoraRecipe) -> None:
    """Print the plan of a run and what this machine lacks for it."""
    if os.environ.get("RANK", "0") != "0":
        return
    if not isinstance(cfg, GenerateRecipe):
        check_batch_sizes(cfg, cfg.runtime.cards or int(os.environ.get("WORLD_SIZE", "1")))
    print(plan(cfg))


def plan(cfg: LoraRecipe) -> str:
    """Cards, batch arithmetic, steps, environment, command and memory of a run, as text."""
    ranks = cfg.runtime.cards or int(os.environ.get("WORLD_SIZE", "1"))
    from recipes.pipeline import generation_plan

    kind = cfg.runtime.device.name
    if kind == "auto":
        kind = "hpu" if hpu_installed() and hpu_cards() else "cuda" if cards("cuda") else "cpu"
    lazy = cfg.runtime.lazy if cfg.runtime.lazy is not None else (kind in ("hpu", "lazy") and not cfg.runtime.compile)
    mode = "lazy" if lazy else "torch.compile" if cfg.runtime.compile else "eager"
    problems = missing_here(cfg, ranks)
    variables = environment(cfg, kind, lazy)
    generating = isinstance(cfg, GenerateRecipe)
    lines = [
        f"model         {cfg.model.name_or_path} ({cfg.model.dtype.name})",
        f"data          {cfg.data.path}, {cfg.data.batching.name}, loss on {cfg.data.loss_on.name}, {cfg.data.max_seq_length} tokens",
        f"device        {kind}, {mode}, {ranks} rank(s)",
        f"here          {'; '.join(problems) if problems else 'nothing is missing'}",
        *([f"no effect     {', '.join(idle)}"] if (idle := without_effect(cfg.runtime, kind, lazy)) else []),
        *(generation_plan.batch_lines(cfg, ranks, lazy) if generating else _batch_lines(cfg, ranks)),
        f"environment   {shlex.join(f'{name}={value}' for name, value in variables.items()) or 'nothing to set'}",
        f"command       {launch_command(cfg, [])}",
        *_memory_lines(cfg),
    ]
    if generating:
        lines[1] = f"prompts       {generation_plan.source(cfg)}"
    return "\n".join(lines)


def _batch_lines(cfg: LoraRecipe, ranks: int) -> list[str]:
    train = cfg.train
    rows = train.per_device_train_batch_size * train.gradient_accumulation_steps * ranks
    lines = [
        f"batch         {train.per_device_train_batch_size} rows x {train.gradient_accumulation_steps} accumulated x {ranks} rank(s)"
        f" = {rows} rows a step, up to {rows * cfg.data.max_seq_length:,} tokens"
    ]
    if train.max_steps > 0:
        lines.append(f"steps         {train.max_steps} (train.max_steps)")
    elif (records := _count_records(Path(cfg.data.path))) and cfg.data.batching.name == "padded":
        kept = min(records, train_limit) if (train_limit := cfg.data.max_train_samples) else records
        held = 0 if cfg.data.eval_path else math.ceil(records * cfg.data.validation_split_percentage / 100)
        steps = math.ceil(train.num_train_epochs * math.ceil((kept - held) / rows))
        lines.append(f"steps         about {steps:,}: {train.num_train_epochs:g} epoch(s) of {kept - held:,} records")
    else:
        lines.append(f"steps         {train.num_train_epochs:g} epoch(s); counted when the data has been read")
    return lines


def _count_records(path: Path) -> int | None:
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return None
    try:
        text = path.read_text(encoding="utf-8")
        return len(json.loads(text)) if path.suffix == ".json" else sum(1 for line in text.splitlines() if line.strip())
    except (ValueError, OSError):
        return None


def _memory_lines(cfg: LoraRecipe) -> list[str]:
    from modeling import memory
    from recipes.pipeline import memory_plan

    config = shape_of(cfg)
    if config is None:
        return ["memory        unknown: the model is not on this machine and model.shape is empty"]
    trained = 0
    if cfg.adapter.kind.name == "lora" and cfg.train.do_train and not isinstance(cfg, GenerateRecipe):
        trained = memory.lora_parameters(config, cfg.adapter.r, cfg.adapter.target_modules)
    first = f"parameters    {memory.model_parameters(config):,}, of which the adapter adds and trains {trained:,}"
    return [first, *memory_plan.lines(cfg)]


def shape_of(cfg: LoraRecipe) -> LlamaConfig | None:
    """The model's LlamaConfig from its folder or from the configuration; None where neither is at hand."""
    from transformers import LlamaConfig

    known: dict[str, Any] = dict(cfg.model.config or cfg.model.shape)
    local = Path(cfg.model.name_or_path) / "config.json"
    if local.is_file():
        try:
            known = json.loads(local.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{local}: not valid JSON ({error}); copy the model anew") from error
    return LlamaConfig(**known) if known else None
