"""Attention by name: attend(q, k, v, mask, dropout) -> (B, S, N, D).

q (B, N, S, D), k and v (B, K, T, D) with N a multiple of K, mask boolean (B or 1, 1, S, T), true where a query sees a key.
mask None means: causal where there is more than one query (then S = T), everything seen where there is one.
A query that sees nothing gives zeros, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
NAMES = ("eager", "sdpa", "flex", "fused_sdpa")


class FusedOptions(NamedTuple):
    """Switches of Gaudi's fused kernel. Both together, with gradients and a mask, are refused by it."""

    recompute: bool = False
    fast_softmax: bool = False


def by_name(name: str, softmax_bf16: bool = False, fused: FusedOptions | None = None) -> Attend:
    """Raises ValueError for a name that is not one of NAMES."""
    if name == "eager":
        return partial(eager, softmax_dtype=torch.bfloat16 if softmax_bf16 else torch.float32)
    if name == "sdpa":
        return sdpa
    if name == "flex":
        return flex
    if name == "fused_sdpa":
        return _fused(fused or FusedOptions())
    raise ValueError(f"attention {name!r} is not one of: {', '.join(NAMES)}")


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **options: torch.dtype) -> Tensor:
    """Matrix products and a softmax in float32 (or `softmax_dtype`)."""
    return attention_weights(q, k, v, mask, dropout, **options)[0]


def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    softmax_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """As `eager`, with the weights (B, N, S, T) as second result."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.eq(0), torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=softmax_dtype).to(q.dtype)
    if mask is not None:
        weights = weights * mask  # zeros for a row without any key
    weights = F.dropout(weights, p=dropout)
    return torch.matmul(weights, v).transpose(1, 2), weights


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """torch's scaled_dot_product_attention."""
    causal = mask is None and q.shape[2] > 1
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """torch's flex_attention; no dropout, and on a CPU no gradients (torch has no such kernel)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if dropout:
        raise ValueError(f"attention flex has no dropout, attention_dropout is {dropout}")

    by_row = None if mask is None else mask[:, 0].expand(q.shape[0], -1, -1)  # torch 2.10 takes tensors as indices only

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key if by_row is None else by_row[batch, query, key]

    block = None
    if mask is not None or q.shape[2] > 1:
        rows = None if mask is None else q.shape[0]
        block = create_block_mask(seen, rows, None, q.shape[2], k.shape[2], device=q.device)
    return flex_attention(q, k, v, block_mask=block, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _fused(options: FusedOptions) -> Attend:
    # Positional arguments only, in this order: q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode,
    # recompute_mode, valid_seq_len, seq_padding_type (gaudi-pytorch-bridge, hpex/kernels/FusedSDPA.py)
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    mode = "fast" if options.fast_softmax else "None"

    def fused_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
        added = None
        if mask is not None:
            added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(
                mask.eq(0), torch.finfo(q.dtype).min
            )
        if q.shape[2] == 1:
            out = FusedSDPA.apply(q, k, v, added, 0.0, False, None, "None", False, None, "None")
        elif added is None:
            out = FusedSDPA.apply(q, k, v, None, dropout, True, None, mode, options.recompute, None, "left")
        else:
            out = FusedSDPA.apply(q, k, v, added, dropout, False, None, mode, options.recompute, None, "None")
        return out.transpose(1, 2)

    return fused_sdpa
