"""How many rows fit into memory, and what running out of it looks like."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from recipes.pipeline import memory_plan

if TYPE_CHECKING:
    from recipes.pipeline.config import GenerateRecipe
    from recipes.pipeline.ranks import Ranks
    from recipes.pipeline.runtime import Runtime

SHARE = 0.9  # of what is free: the allocator's waste and libraries' own memory are in no plan
MOST_ROWS = 512
FEW, MANY = 8, 16  # rows that are planned; the rest is a straight line
THERE = ("weights", "adapter", "buffers")  # static terms of a plan that a loaded model has already taken


def row_bytes(cfg: GenerateRecipe, longest: int) -> dict[str, tuple[float, float]]:
    """(bytes of no row, bytes of each row) beside a loaded model, by step of generation; prompts of up to `longest` tokens."""

    def beside(rows: int) -> dict[str, int]:
        other = copy.deepcopy(cfg)
        other.generate.batch_size, other.generate.max_prompt_tokens = rows, longest
        plans = memory_plan.plans(other, depths=memory_plan.QUICK)
        return {name: made.high - sum(made.static.get(term, 0) for term in THERE) for name, made in plans.items()}

    few, many = beside(FEW), beside(MANY)
    each = {name: (many[name] - few[name]) / (MANY - FEW) for name in few}
    return {name: (few[name] - FEW * each[name], each[name]) for name in few}


def free_bytes(kind: str) -> int:
    """Memory that this process can still take on its device."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[0]
    if kind == "hpu":
        stats = torch.hpu.memory_stats()
        return stats["Limit"] - stats["InUse"]
    import psutil

    return psutil.virtual_memory().available


def planned_rows(cfg: GenerateRecipe, runtime: Runtime, ranks: Ranks, longest: int) -> int:
    """Rows of a batch that fit beside the weights, by the memory plan: from 1 to 512, the same on all ranks. Collective."""
    ranks_here = runtime.world_size if runtime.kind in ("cpu", "lazy") else 1
    free = SHARE * free_bytes(runtime.kind) / ranks_here
    fitting = min(int((free - fixed) // each) for fixed, each in row_bytes(cfg, longest).values())
    return max(1, min(MOST_ROWS, *ranks.gather({runtime.rank: fitting}).values()))


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch says that a device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(
        words in text for words in ("out of memory", "can't allocate memory", "not enough memory", "allocation failed")
    )
