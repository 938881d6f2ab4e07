"""What a generation run is going to do, foretold: prompts, their lengths, and batches. Neither torch nor datasets is needed."""

from __future__ import annotations

import math

from recipes.pipeline.config import GenerateConfig, GenerateRecipe, InputError
from recipes.pipeline.preflight import shape_of

ASSUMED = 512  # tokens of a prompt where nothing bounds them
BUCKET = 128  # tokens, where graphs are kept


def source(cfg: GenerateRecipe) -> str:
    """Where the prompts come from, in words."""
    options = cfg.generate
    wrapped = f", in the {cfg.data.template.name} template" if options.template else ", as they stand"
    if options.held_out:
        return f"the held-out records of {cfg.data.path}{wrapped}"
    if options.file is not None:
        return f"{options.file}{wrapped}"
    return f"{len(options.prompt)} from the command line{wrapped}"


def longest_prompt(cfg: GenerateRecipe, lazy: bool) -> int:
    """Tokens that the plan reckons with: the option, else a bucket of the run's, as far as the model's positions go."""
    said = cfg.generate.max_prompt_tokens
    assumed = min(ASSUMED, prompt_limit(cfg) or ASSUMED)
    return padded_width(said or assumed, cfg.generate, lazy or cfg.runtime.compile)


def padded_width(longest: int, options: GenerateConfig, whole: bool) -> int:
    """Length that prompts of up to `longest` tokens are padded to."""
    bucket = options.length_bucket or (BUCKET if whole else 1)
    width = math.ceil(longest / bucket) * bucket
    chunk = options.prefill_chunk
    return math.ceil(width / chunk) * chunk if whole and chunk and width > chunk else width


def prompt_limit(cfg: GenerateRecipe) -> int | None:
    """Most tokens of a prompt: the option, and what the model's positions leave; None where neither is known yet."""
    shape, options = shape_of(cfg), cfg.generate
    limits = [] if options.max_prompt_tokens is None else [options.max_prompt_tokens]
    if shape is not None:
        room = shape.max_position_embeddings - options.max_new_tokens
        if room < 1:
            raise InputError(
                f"generate.max_new_tokens={options.max_new_tokens} leaves no room for a prompt in the model's"
                f" {shape.max_position_embeddings} positions; lower it"
            )
        limits.append(room)
    return min(limits, default=None)


def batch_lines(cfg: GenerateRecipe, ranks: int, lazy: bool) -> list[str]:
    """Batch arithmetic and how tokens are chosen."""
    options = cfg.generate
    groups = max(1, ranks // options.tensor_parallel)
    shared = f", {options.tensor_parallel} ranks share a model" if options.tensor_parallel > 1 else ""
    rows = options.batch_size if isinstance(options.batch_size, str) else f"{options.batch_size} rows"
    said = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}, top_k {options.top_k}"
    if options.temperature:
        said += f", top_p {options.top_p:g}"
    return [
        f"batch         {rows} x {groups} group(s) of ranks{shared}; up to {longest_prompt(cfg, lazy):,} + {options.max_new_tokens} tokens",
        f"tokens        {said}, repetition penalty {options.repetition_penalty:g}",
    ]
