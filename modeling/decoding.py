"""Llama's forward for generation where ops are dispatched one by one: the same maths as llama.py in fewer, larger ops.

B rows, S new tokens, T keys, H hidden, N heads, K key/value heads, D head dim, V vocabulary, R adapter rank.

A decoding step is bound by reading the weights and by the host's work per op. So q, k and v are one product, gate and up are
one, the residual add is part of the product before it, and rotation is one op for queries and keys. On a CPU's threads a
product in float32 is a batch of products, a part of the outputs each, because one product with few rows is shared out badly; on
one thread weights are stored along their longer side, and the head is cut into blocks, so that memory is read in order. Not for
graphs, compilers, training or tensor parallelism; there is no seam here: nothing of a step can be seen from outside, and nothing of it
is lazy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.cache import ReusedKeyValues
from modeling.execution import Execution
from modeling.llama import LlamaForCausalLM, LlamaHead

HEAD_BLOCK = 1024  # rows of the head in one product
FEW_ROWS = 64  # up to here one product is shared out badly among a CPU's threads


class LowRank(NamedTuple):
    """A linear module's adapter: what is added is x @ down.T @ up.T * scale."""

    down: Tensor  # (R, inputs)
    up: Tensor  # (outputs, R)
    scale: float


Adapted = Callable[[nn.Module], tuple[nn.Module, LowRank | None] | None]


def plain(module: nn.Module) -> tuple[nn.Module, LowRank | None] | None:
    """A linear module of torch's own is itself, without an adapter; others are not known."""
    if type(module) in (nn.Linear, LlamaHead) and module.bias is None and not _watched(module):
        return module, None
    return None


class Product:
    """Several linear modules of one input as one; their weights become views of the joined one, so no memory is added."""

    def __init__(self, modules: Sequence[nn.Module], adapters: Sequence[LowRank | None]) -> None:
        joined = torch.cat([module.weight.data for module in modules]).t()  # (inputs, outputs)
        self.parts = _parts(joined)  # (parts, inputs, outputs of a part); None: one product
        if self.parts is None and joined.shape[0] <= joined.shape[1]:
            joined = joined.contiguous()
        start = 0
        for module in modules:
            end = start + module.weight.shape[0]
            module.weight.data = joined[:, start:end].t()
            start = end
        self.weight = joined
        self.low: tuple[Tensor, Tensor] | None = None
        if any(adapters):
            self.low = _joined_adapters(modules, adapters)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (T, inputs) -> (T, outputs), added to `residual` in its memory if there is one."""
        if self.parts is not None and len(x) <= FEW_ROWS:
            out = self._in_parts(x, residual)
        else:
            out = torch.mm(x, self.weight) if residual is None else residual.addmm_(x, self.weight)
        return out if self.low is None else out.addmm_(torch.mm(x, self.low[0]), self.low[1])

    def _in_parts(self, x: Tensor, residual: Tensor | None) -> Tensor:
        count, rows = len(self.parts), len(x)
        shared = x.expand(count, *x.shape)
        if residual is None:
            return torch.bmm(shared, self.parts).transpose(0, 1).reshape(rows, -1)
        parts = residual.view(rows, count, -1).transpose(0, 1)
        if rows == 1:
            parts.baddbmm_(shared, self.parts)
        else:  # whose parts are no whole memory of their own, which the fused op copies
            parts.add_(torch.bmm(shared, self.parts))
        return residual


def _parts(weight: Tensor) -> Tensor | None:
    """(inputs, outputs) as products that a CPU's threads share: as many as threads, where they divide the outputs."""
    count = math.gcd(torch.get_num_threads(), weight.shape[1])
    if weight.device.type != "cpu" or weight.dtype is not torch.float32 or count == 1:
        return None
    return weight.t().view(count, -1, weight.shape[0]).transpose(1, 2)


def _joined_adapters(modules: Sequence[nn.Module], adapters: Sequence[LowRank | None]) -> tuple[Tensor, Tensor]:
    # Stacked downs, ups on a diagonal of blocks: one pair of products for all
    present = [low if low is not None else _nothing(module) for module, low in zip(modules, adapters, strict=True)]
    down = torch.cat([low.down for low in present]).t().contiguous()
    up = torch.block_diag(*[low.up * low.scale for low in present]).t().contiguous()
    return down.to(modules[0].weight.dtype), up.to(modules[0].weight.dtype)


def _nothing(module: nn.Module) -> LowRank:
    weight = module.weight
    return LowRank(weight.new_zeros(0, weight.shape[1]), weight.new_zeros(weight.shape[0], 0), 1.0)


class Layer(NamedTuple):
    attention_norm: Tensor
    qkv: Product
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class FusedDecoder:
    """Scores of a Llama, over a cache that is not `whole`. Raises ValueError where `can_fuse` says no."""

    def __init__(self, model: LlamaForCausalLM, length: int, adapted: Adapted = plain) -> None:
        if not can_fuse(model, adapted):
            raise ValueError("this model's modules cannot be joined; run it as it is")
        base, config = model.model, model.config
        first = base.layers[0].self_attn
        self.head_dim, self.eps = first.head_dim, config.rms_norm_eps
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.embed, self.norm, self.head = base.embed_tokens, base.norm.weight.data, model.lm_head.weight.data
        self.layers = [_layer(layer, adapted) for layer in base.layers]
        cos, sin = base.rotary_emb(torch.arange(length, device=self.norm.device).unsqueeze(0))
        half = self.head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # the turned half's sign belongs to the table
        self.tables = cos[0].to(self.norm.dtype), sin[0].to(self.norm.dtype)  # (T, D)

    def __call__(self, ids: Tensor, mask: Tensor | None, places: Tensor, cache: ReusedKeyValues) -> Tensor:
        """ids (B, S) at `places` (B or 1, S) of their texts, mask (B, T) -> scores (B, V) behind the last ids."""
        rows, count = ids.shape
        # (B or 1, S, 1, D)
        cos, sin = (table[places].unsqueeze(2) for table in self.tables)
        seen = _seen(mask, rows, count, cache)
        x = self.embed(ids).flatten(0, 1)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(rows, count, -1, self.head_dim)
            turned = qkv[:, :, : self.heads + self.key_heads]
            turned = (turned * cos).add_(turned.roll(self.head_dim // 2, -1).mul_(sin))
            q, k = (part.transpose(1, 2) for part in turned.split((self.heads, self.key_heads), dim=2))
            v = qkv[:, :, self.heads + self.key_heads :].transpose(1, 2)
            k, v = cache.update(k, v, index, {})
            x = layer.out(self._attend(q, k, v, seen), x)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = layer.down(F.silu(gate).mul_(up), x)
        cache.advance(count)
        last = x.view(rows, count, -1)[:, -1]
        return self._scores(self._norm(last, self.norm))

    def _scores(self, x: Tensor) -> Tensor:
        """x (B, H) -> (B, V). On a CPU one product with a table of this height reads it at half the memory's speed."""
        rows, height = len(x), len(self.head)
        if x.device.type != "cpu" or x.dtype is not torch.float32 or height % 2:
            return F.linear(x, self.head)
        if rows == 1:
            return torch.bmm(x.expand(2, 1, -1), self.head.view(2, height // 2, -1).transpose(1, 2)).view(1, height)
        out = x.new_empty(rows, height)
        for start in range(0, height, HEAD_BLOCK):
            block = slice(start, start + HEAD_BLOCK)
            torch.mm(x, self.head[block].t(), out=out[:, block])
        return out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # ops.rms_norm's formula in its input's own precision's fewest ops
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = size.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        if x.dtype is torch.float32:
            return (x * inverse).mul_(weight)
        return (x.float() * inverse).to(x.dtype).mul_(weight)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """q (B, N, S, D), k and v (B, K, T, D) -> (B * S, N * D)."""
        rows, heads, count, _ = q.shape
        if count == 1:  # the heads that share keys are as good as more queries: nothing is repeated
            q = q.reshape(rows, self.key_heads, -1, self.head_dim)
            return F.scaled_dot_product_attention(q, k, v, seen).reshape(rows, -1)
        causal, grouped = seen is None, heads != self.key_heads
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(rows * count, -1)


def _layer(layer: nn.Module, adapted: Adapted) -> Layer:
    def product(*modules: nn.Module) -> Product:
        return Product(*zip(*(adapted(module) for module in modules), strict=True))

    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        layer.input_layernorm.weight.data,
        product(attention.q_proj, attention.k_proj, attention.v_proj),
        product(attention.o_proj),
        layer.post_attention_layernorm.weight.data,
        product(mlp.gate_proj, mlp.up_proj),
        product(mlp.down_proj),
    )


def _seen(mask: Tensor | None, rows: int, count: int, cache: ReusedKeyValues) -> Tensor | None:
    """Boolean (B, 1, S, T); None where a causal kernel, or no restriction, says the same."""
    before = cache.filled
    if mask is None and (count == 1 or before == 0):
        return None
    if count == 1:
        return mask[:, None, None]
    keys = before + count
    order = torch.arange(keys, device=cache.position.device)
    causal = order <= order[before:].unsqueeze(1)
    return causal[None, None] if mask is None else causal & mask[:, None, None]


def can_fuse(model: nn.Module, adapted: Adapted = plain) -> bool:
    """Whether `FusedDecoder` computes what the model does: plain modules, nobody watching, no mode asked for."""
    if type(model) is not LlamaForCausalLM or plain(model.lm_head) is None:
        return False
    base, execution = model.model, model.model.execution
    if base.rotary_emb.kind in ("dynamic", "longrope") or not _default(execution):
        return False
    # a forward on the meta device or under ZeRO-3 has weights that are not there
    if any(p.device.type not in ("cpu", "cuda") or not p.numel() for p in model.parameters()):
        return False
    names = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    for layer in base.layers:
        parts = [getattr(layer.self_attn, n) for n in names[0]] + [getattr(layer.mlp, n) for n in names[1]]
        if any(adapted(part) is None for part in parts) or any(map(_watched, layer.modules())):
            return False
    return not any(map(_watched, (model, base, base.embed_tokens, base.norm)))


def _default(execution: Execution) -> bool:
    return execution.attention == "sdpa" and execution.in_place_residual is None and execution.plain


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
