"""Scores of the next token -> the token: greedy, or drawn after repetition penalty, temperature, top-k and top-p, in this order.

B rows, V vocabulary, T new tokens. A draw needs one uniform number; each prompt has its own row of them, made from its seed
alone, so that a prompt's text depends neither on the rows beside it nor on the rank that runs it. Nothing here
synchronises with the host or has a shape that depends on data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.pipeline.config import GenerateConfig


def prompt_seed(seed: int, index: int) -> int:
    """A seed for the prompt at place `index` of the input."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=7).digest(), "big")


def uniform_rows(seeds: Sequence[int], tokens: int) -> Tensor:
    """Uniform numbers in [0, 1), (B, T); a row depends on its seed only, and its first numbers not on T."""
    return torch.stack([torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


class Sampler:
    """Chooses the tokens of one batch."""

    def __init__(
        self, options: GenerateConfig, prompts: Sequence[Sequence[int]], seeds: Sequence[int], vocabulary: int
    ) -> None:
        self.options = options
        self.noise = None if options.temperature == 0 else uniform_rows(seeds, options.max_new_tokens)
        self.seen = None
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
            for row, ids in enumerate(prompts):
                self.seen[row, torch.tensor(ids)] = True
        self.step = torch.zeros(1, dtype=torch.long)

    def to(self, device: torch.device) -> Sampler:
        """The same on `device`."""
        for name in ("noise", "seen", "step"):
            tensor = getattr(self, name)
            setattr(self, name, tensor if tensor is None else tensor.to(device))
        return self

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows that `rows` lists."""
        self.noise = self.noise if self.noise is None else self.noise.index_select(0, rows)
        self.seen = self.seen if self.seen is None else self.seen.index_select(0, rows)

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores (B, V) -> tokens (B,)."""
        if self.seen is not None:
            scores = penalised(scores, self.seen, self.options.repetition_penalty)
        if self.noise is None:
            tokens = scores.argmax(-1)
        else:
            column = self.noise.index_select(
                1, self.step
            )  # not [:, n]: a number of its own would be a graph of its own
            tokens = draw(scores.float(), self.options, column)
            self.step.add_(1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens.unsqueeze(1), True)
        return tokens


def penalised(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores (B, V) of tokens that `seen` (B, V) marks moved towards "unlikely" (Keskar et al., 2019)."""
    worse = torch.maximum(scores, torch.zeros_like(scores)) / penalty + scores.clamp(max=0) * penalty
    return torch.where(seen, worse, scores)


def draw(scores: Tensor, options: GenerateConfig, noise: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution at `noise` (B, 1)."""
    values, names = kept(scores / options.temperature, options)
    shares = values.softmax(-1)
    if options.top_p < 1:
        before = shares.cumsum(-1) - shares  # probability of the likelier tokens
        shares = shares * (before < options.top_p)
    total = shares.cumsum(-1)
    place = (total <= noise * total[:, -1:]).sum(-1, keepdim=True).clamp(max=total.shape[-1] - 1)
    return (place if names is None else names.gather(1, place)).squeeze(1)


def kept(scores: Tensor, options: GenerateConfig) -> tuple[Tensor, Tensor | None]:
    """Scores to draw from and the tokens they belong to, best first where top_k or top_p cut; None: the whole vocabulary."""
    if 0 < options.top_k < scores.shape[-1]:
        return scores.topk(options.top_k)
    if options.top_p < 1:
        return scores.sort(dim=-1, descending=True)
    return scores, None
