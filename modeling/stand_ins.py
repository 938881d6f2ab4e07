"""Stand-ins that only take memory: what a vendor's kernel leaves for backward, and nothing else of it.

With them the real code of attention.py and ops.py is traced on a machine without Gaudi or DeepSpeed. What is kept follows the
public sources (gaudi-pytorch-bridge: hpex/kernels/FusedSDPA.py, hpex/normalization, hpex/kernels/RotaryPosEmbeddingHelper.py;
DeepSpeed: runtime/zero/linear.py): without recompute FusedSDPA keeps the whole matrix of weights (B, N, S, T) for backward,
with it two numbers a query; ZeRO-3's linear keeps its input whether or not its weight is trained.
B batch, N heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

PACKAGE = "habana_frameworks.torch.hpex"


# Each kernel is one op: nothing cuts a graph inside it


def _sdpa_forward(q: Tensor, k: Tensor, kept: str) -> list[Tensor]:
    found = [torch.empty_like(q)]
    if kept == "weights":
        found.append(q.new_empty(*q.shape[:3], k.shape[2]))
    if kept == "statistics":
        found += [q.new_empty(*q.shape[:3], 1), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)]
    return found


def _sdpa_backward(q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (q, k, v)]


def _norm_forward(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)]


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _op(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    made = custom_op(f"stand_in::{name}", function, mutates_args=())
    made.register_fake(function)
    return made


sdpa_forward, sdpa_backward = _op("sdpa_forward", _sdpa_forward), _op("sdpa_backward", _sdpa_backward)
norm_forward, like = _op("rms_norm", _norm_forward), _op("rotate", _like)


def scratch(func: Any, args: tuple, result: Any) -> int:
    """Bytes that a kernel takes and gives back: without recompute, attention's backward makes the gradients of the weights and of
    the scores beside the weights, as the bridge's own reference of it does (its tests of sdpa_bwd)."""
    if func is torch.ops.stand_in.sdpa_backward.default and args[3] is not None:
        return 2 * args[3].nbytes
    return 0


class FusedSDPA(Function):
    """(q (B, N, S, D), k, v (B, K, T, D), ...) -> (B, N, S, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
        if not any(ctx.needs_input_grad):
            return sdpa_forward(q, k, "nothing")[0]
        recompute = bool(options[4])
        out, *kept = sdpa_forward(q, k, "statistics" if recompute else "weights")
        ctx.save_for_backward(q, k, v, None if recompute else kept[0], *((mask, *kept) if recompute else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *sdpa_backward(*ctx.saved_tensors[:4]), *[None] * 8


class FusedRMSNorm(Function):
    """(x (..., H), weight (H,), eps) -> (..., H); keeps x and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = norm_forward(x)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return like(x), like(weight) if ctx.needs_input_grad[1] else None, None


class RotaryPosEmbeddingHelperV2(Function):
    """(x (B, N, S, D), cos, sin, positions) -> (B, N, S, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        return like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return like(grad), None, None, None


class ZeroLinear(Function):
    """(x (..., H), weight (O, H), bias (O,) or None) -> (..., O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        out = x.matmul(weight.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


@contextmanager
def in_place_of_zero3() -> Iterator[None]:
    """Inside, every linear module works as under ZeRO-3."""
    with patch("torch.nn.functional.linear", lambda x, weight, bias=None: ZeroLinear.apply(x, weight, bias)):
        yield


@contextmanager
def in_place_of_gaudi() -> Iterator[None]:
    """Inside, `from habana_frameworks.torch.hpex.kernels import ...` gives the stand-ins, also where Gaudi's software is."""
    names = PACKAGE.split(".")
    modules = {".".join(names[: n + 1]): types.ModuleType(".".join(names[: n + 1])) for n in range(len(names))}
    kernels, normalization = types.ModuleType(f"{PACKAGE}.kernels"), types.ModuleType(f"{PACKAGE}.normalization")
    kernels.FusedSDPA, kernels.RotaryPosEmbeddingHelperV2 = FusedSDPA, RotaryPosEmbeddingHelperV2
    normalization.FusedRMSNorm = FusedRMSNorm
    modules |= {kernels.__name__: kernels, normalization.__name__: normalization}
    with patch.dict(sys.modules, modules):
        yield
