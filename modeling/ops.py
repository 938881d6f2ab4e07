"""Reference kernels of Llama and, by name, the device's own behind the same signatures.

B batch, S sequence, H hidden, I intermediate, N heads, D head dim, V vocabulary. All accept any leading dimensions.
The custom autograd functions exist for memory: each keeps for backward only what it cannot cheaply compute again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

IGNORED = -100


class Ops(NamedTuple):
    """Implementations of one name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # (x (..., H), weight (H,), eps) -> (..., H)
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (x (B, N, S, D), cos, sin, positions) -> (B, N, S, D)


def by_name(name: str) -> Ops:
    """Raises ValueError for a name that is not one of the implementations."""
    if name == "eager":
        return Ops(rms_norm, rotate)
    if name == "hpu":
        return Ops(*_hpu_kernels())
    raise ValueError(f"ops {name!r} is not one of: eager, hpu")


# RMSNorm (Zhang and Sennrich, 2019), in float32 whatever the input


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)
    return weight * _normalize(x, _inverse_rms(x, eps))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    if x.device.type == "lazy":  # its engine has no norm with a dtype
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # no float32 copy of x
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


def _normalize(x: Tensor, inverse: Tensor) -> Tensor:
    if x.dtype is torch.float32:
        return x * inverse
    return x.float().mul_(inverse).to(x.dtype)


class _RmsNorm(Function):
    """Keeps x and one number a row; plain autograd keeps two or three float32 copies of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return weight * _normalize(x, inverse)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad * _normalize(x, inverse)).reshape(-1, x.shape[-1])
            grad_weight = rows.sum(0, dtype=torch.float32).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled = (grad * weight).float()
            along = (scaled * x).mean(-1, keepdim=True) * inverse.square()
            grad_x = ((scaled - x * along) * inverse).to(x.dtype)
        return grad_x, grad_weight, None


# Rotary position embedding (Su et al., 2021), half-rotation layout


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """x (B, N, S, D) turned by the angles of cos and sin (B or 1, S, D), which are cast to x's dtype."""
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


# SwiGLU (Shazeer, 2020)


def swiglu(gate: Callable[[Tensor], Tensor], up: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """silu(gate(x)) * up(x), (..., H) -> (..., I). Without gradients gate(x) is gone before up(x) is there."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(gate(x), up(x))
    return torch.nn.functional.silu(gate(x)).mul_(up(x))


class _SwiGlu(Function):
    """Keeps gate and up; plain autograd keeps silu(gate) as well."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        activated = torch.nn.functional.silu(gate)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad * activated


# Loss: linear head and cross entropy by chunks, so that the logits of a whole batch never exist


class LossSums(NamedTuple):
    """Sums over the targets; 0-d tensors."""

    nats: Tensor  # float32, differentiable
    targets: Tensor  # int64
    correct: Tensor  # int64, targets that are the most likely token; counted without gradients only


def shifted_targets(labels: Tensor) -> Tensor:
    """Labels (B, S) moved one to the left: position t is scored against token t+1, the last against nothing."""
    return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> LossSums:
    """Cross entropy of hidden (T, H) @ weight.T (V, H) against targets (T,), `chunk` rows of logits at a time.

    Reductions are in float32. The gradients are computed together with the loss, chunk by chunk, so backward needs
    neither logits nor the (under ZeRO-3 gathered) weight.
    """
    hidden, targets = _without_ignored(hidden, targets)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        nats = _LinearCrossEntropy.apply(hidden, weight, targets, chunk)
        return LossSums(nats, targets.ne(IGNORED).sum(), torch.zeros_like(targets.sum()))
    nats = hidden.new_zeros((), dtype=torch.float32)
    correct = torch.zeros_like(targets.sum())
    for part, wanted in _chunks(hidden, targets, chunk):
        logits = part @ weight.T
        nats = nats + torch.nn.functional.cross_entropy(logits.float(), wanted, ignore_index=IGNORED, reduction="sum")
        correct = correct + logits.argmax(-1).eq(wanted).sum()
    return LossSums(nats, targets.ne(IGNORED).sum(), correct)


def _chunks(hidden: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, hidden.shape[0], chunk):  # slices: torch's lazy engine cannot split
        yield hidden[start : start + chunk], targets[start : start + chunk]


def _without_ignored(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    # The number of targets is data: taking it would cut a lazy graph and give each batch a shape of its own
    if torch.compiler.is_compiling() or hidden.device.type not in ("cpu", "cuda"):
        return hidden, targets
    kept = targets.ne(IGNORED)
    return (hidden, targets) if bool(kept.all()) else (hidden[kept], targets[kept])


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        nats = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            scores = (hidden[rows] @ weight.T).float()
            wanted = targets[rows].unsqueeze(1)
            kept = wanted.ne(IGNORED)
            wanted = wanted.masked_fill(~kept, 0)
            total = scores.logsumexp(-1, keepdim=True)
            nats = nats + ((total - scores.gather(1, wanted)) * kept).sum()
            # d nats / d scores = softmax - one-hot, in the scores' own memory
            scores.sub_(total).exp_()
            scores.scatter_add_(1, wanted, -torch.ones_like(total))
            scores.mul_(kept)
            if grad_hidden is not None:
                grad_hidden[rows] = scores.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight.addmm_(scores.T, hidden[rows].float())
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return nats

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def chunked_cross_entropy(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk: int) -> LossSums:
    """As `linear_cross_entropy` for any head (an adapter's): each chunk's logits are computed again in backward."""
    hidden, targets = _without_ignored(hidden, targets)

    def sums(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(part)
        nats = torch.nn.functional.cross_entropy(logits.float(), wanted, ignore_index=IGNORED, reduction="sum")
        return nats, logits.argmax(-1).eq(wanted).sum()

    nats = hidden.new_zeros((), dtype=torch.float32)
    correct = torch.zeros_like(targets.sum())
    for part, wanted in _chunks(hidden, targets, chunk):
        more, right = checkpoint(sums, part, wanted, use_reentrant=False)
        nats, correct = nats + more, correct + right
    return LossSums(nats, targets.ne(IGNORED).sum(), correct)


# Gaudi's fused kernels. Signatures: gaudi-pytorch-bridge, hpex/normalization and hpex/kernels


def _hpu_kernels() -> tuple[Callable, Callable]:
    from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingHelperV2
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return FusedRMSNorm.apply(x.to(weight.dtype), weight, eps).to(x.dtype)  # the kernel takes one dtype only

    def fused_rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        # Tables [1, 1, S, D] are gathered by positions (B, S) inside; ours are already in order
        cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
        if cos.shape[0] == 1:
            order = torch.arange(x.shape[2], device=x.device).expand(x.shape[0], -1)
            return RotaryPosEmbeddingHelperV2.apply(x, cos, sin, order)
        half = x.shape[-1] // 2  # rows with positions of their own: the plain formula
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return fused_rms_norm, fused_rotate
