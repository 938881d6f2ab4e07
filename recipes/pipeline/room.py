"""How many rows fit into memory, and what running out of it looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from recipes.pipeline.generation import Generator

SHARE = 0.9  # of what is free: kernels' scratch and the allocator's waste are in no plan
MOST_ROWS = 512


def row_bytes(config: LlamaConfig, prompt: int, new: int, size: int, chunk: int = 0) -> dict[str, int]:
    """Bytes that one row adds at the peak of generation, by term; `size` bytes a number, prompts of `prompt` tokens."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    together = min(prompt, chunk) if chunk else prompt
    # of one layer at prefill: the stream, the norm's result, and gate, up and their product
    widest = 2 * config.hidden_size + 2 * config.intermediate_size
    return {
        "keys and values": 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * (prompt + new) * size,
        "activations of a layer": together * widest * size,
        "scores of the next token": 2 * config.vocab_size * 4,
    }


def free_bytes(kind: str) -> int:
    """Memory that this process can still take on its device."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[0]
    if kind == "hpu":
        stats = torch.hpu.memory_stats()
        return stats["Limit"] - stats["InUse"]
    import psutil

    return psutil.virtual_memory().available


def planned_rows(generator: Generator, longest: int) -> int:
    """Rows of a batch that fit beside the weights: from 1 to 512, the same on all ranks. Collective."""
    options, config = generator.options, generator.model.config
    size = next(p.element_size() for p in generator.model.parameters() if p.is_floating_point())
    each = sum(row_bytes(config, longest, options.max_new_tokens, size, options.prefill_chunk).values())
    ranks_here = generator.runtime.world_size if generator.runtime.kind in ("cpu", "lazy") else 1
    fitting = int(SHARE * free_bytes(generator.runtime.kind) / ranks_here // each)
    counts = generator.ranks.gather({generator.runtime.rank: fitting})
    return max(1, min(MOST_ROWS, *counts.values()))


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch says that a device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(
        words in text for words in ("out of memory", "can't allocate memory", "not enough memory", "allocation failed")
    )
