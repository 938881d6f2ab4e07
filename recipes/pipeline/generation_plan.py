"""What a generation run is going to do, foretold: prompts and batches."""

from __future__ import annotations

from recipes.pipeline.config import GenerateRecipe

ASSUMED = 512  # tokens of a prompt where nothing bounds them


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
    from recipes.pipeline.decoder import padded_width
    from recipes.pipeline.questions import prompt_limit

    said = cfg.generate.max_prompt_tokens
    assumed = min(ASSUMED, prompt_limit(cfg) or ASSUMED)
    return padded_width(said or assumed, cfg.generate, lazy or cfg.runtime.compile)


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
