"""Model and cache -> scores of the next token: padding, chunks of a prompt, positions, and how a decoding step is executed.

B rows, W padded prompt length, T cache length, V vocabulary. Prompts are padded on the left, so that all rows write the same
slot of the cache and one position tensor serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn

from modeling.cache import ReusedKeyValues
from modeling.decoding import FusedDecoder, can_fuse
from modeling.llama import LlamaRotaryEmbedding
from recipes.pipeline.adapter import plain_lora
from recipes.pipeline.config import GenerateConfig, RuntimeConfig
from recipes.pipeline.runtime import Runtime


class Step(nn.Module):
    """One forward over a cache, with tensors as its only arguments: what a graph is captured from or compiled."""

    def __init__(self, model: nn.Module, cache: ReusedKeyValues) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, ids: Tensor, mask: Tensor | None, places: Tensor, slots: Tensor, kept: Tensor) -> Tensor:
        """ids (B, S), mask (B, T or fewer), positions in the text (B, S), slots of the cache (S,) -> (B, len(kept), V)."""
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=self.cache,
            cache_position=slots,
            logits_to_keep=kept,
            use_cache=True,
        ).logits


@dataclass(frozen=True)
class Shape:
    """Of the largest batch of a run."""

    rows: int
    length: int  # tokens of a row, prompt and new ones together
    padded: bool  # some row of some batch has padding

    def holds(self, other: Shape) -> bool:
        """Room made for this shape serves the other one too."""
        return self.rows >= other.rows and self.length >= other.length and self.padded >= other.padded


class Decoder:
    """Scores for batches of prompts, in one cache for all of them."""

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        options: GenerateConfig,
        execution: RuntimeConfig,
        shape: Shape,
    ) -> None:
        self.runtime, self.options, self.shape = runtime, options, shape
        self.whole = keeps_graphs(runtime, execution)
        config, dtype = model.config, next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.cache = ReusedKeyValues(config, shape.rows, shape.length, dtype, runtime.device, whole=self.whole)
        self.prompt_step = Step(model, self.cache)
        self.token_step = _executed(Step(model, self.cache), runtime, execution)
        self.fused = None
        inner = model.get_base_model() if isinstance(model, PeftModel) else model
        if options.fused and not self.whole and can_fuse(inner, plain_lora):
            self.fused = FusedDecoder(inner, shape.length, plain_lora)
        self.last = torch.tensor([0], device=runtime.device)
        self.mask: Tensor | None = None
        self.padding: Tensor | None = None
        _settle(inner, runtime)

    def prefill(self, prompts: Sequence[Sequence[int]], width: int, pad: int) -> Tensor:
        """Start a batch with `prompts`, padded to `width`; scores (B, V) behind the last token of each."""
        rows, device = len(prompts), self.runtime.device
        self.cache.begin(rows)
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        padding = torch.tensor([width - len(p) for p in prompts])
        self.mask, padded = None, self.shape.padded if self.whole else bool(padding.any())
        if self.whole or padded:
            self.mask = (torch.arange(self.cache.length) >= padding[:, None]).to(device)
        self.padding = padding.unsqueeze(1).to(device)
        ids, size = ids.to(device), self.options.prefill_chunk or width
        for start in range(0, width, size):
            part = ids[:, start : start + size]
            slots = torch.arange(start, start + part.shape[1], device=device)
            last = start + part.shape[1] == width
            kept = torch.tensor([part.shape[1] - 1] if last else [], dtype=torch.long, device=device)
            mask = self.mask if start or padded else None  # None: a causal kernel, without a mask in memory
            if mask is not None and (start == 0 or not self.whole):
                mask = mask[:, : start + part.shape[1]]
            scores = self._forward(self.prompt_step, part, mask, slots, kept)
        return scores[:, 0]

    def step(self, tokens: Tensor) -> Tensor:
        """Tokens (B,), the last of each row -> scores (B, V) of the next ones."""
        mask = self.mask if self.whole or self.mask is None else self.mask[:, : self.cache.filled + 1]
        slots = self.cache.position.reshape(1).clone()
        return self._forward(self.token_step, tokens.unsqueeze(1), mask, slots, self.last)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows that `rows` lists."""
        self.cache.keep(rows)
        self.mask = self.mask if self.mask is None else self.mask.index_select(0, rows)
        self.padding = self.padding.index_select(0, rows)

    def _forward(self, module: nn.Module, ids: Tensor, mask: Tensor | None, slots: Tensor, kept: Tensor) -> Tensor:
        places = (slots - self.padding).clamp(min=0)
        if self.fused is not None:
            scores = self.fused(ids, mask, places, self.cache).unsqueeze(1)
            self.cache.position.add_(ids.shape[1])
            return scores
        scores = module(ids, mask, places, slots, kept)
        self.cache.position.add_(ids.shape[1])
        return scores


def _settle(model: nn.Module, runtime: Runtime) -> None:
    """What the first forward would make (rotary frequencies, the cache) is data before it, and no part of its graph."""
    for module in model.modules():
        if isinstance(module, LlamaRotaryEmbedding):
            module(torch.zeros(1, 1, dtype=torch.long, device=runtime.device))
    runtime.mark_step()


def keeps_graphs(runtime: Runtime, execution: RuntimeConfig) -> bool:
    """Whether a step's shape must not change: lazy execution, a compiler, or Gaudi in any mode."""
    return runtime.lazy or execution.compile or runtime.kind == "hpu"


def _executed(step: Step, runtime: Runtime, execution: RuntimeConfig) -> nn.Module:
    if execution.compile:
        backend = execution.compile_backend or ("hpu_backend" if runtime.kind == "hpu" else "inductor")
        return torch.compile(step, backend=backend, dynamic=False)
    if execution.use_hpu_graphs_for_inference and runtime.kind == "hpu":
        from habana_frameworks.torch.hpu import wrap_in_hpu_graph

        return wrap_in_hpu_graph(step)
    return step
