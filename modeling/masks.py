"""Which keys each query sees, and the checks of a forward's inputs.

B batch, S queries, T keys. A mask is boolean (B or 1, 1, S, T); None means plain causal (S = T), or everything seen (S = 1).
Where execution is deferred (lazy devices, a compiler) nothing here looks at values: that would cut the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig


def deferred(tensor: Tensor) -> bool:
    """Reading a value of `tensor` would cost a graph."""
    return torch.compiler.is_compiling() or tensor.device.type not in ("cpu", "cuda") or _fake(tensor)


def _fake(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter)


def visible_keys(
    attention_mask: Tensor | None, restarting: Tensor | None, slots: Tensor, keys: int, seen: int | Tensor
) -> Tensor | None:
    """The mask of one forward.

    attention_mask: (B, T or fewer), 1 for a token and 0 for padding on either side; or 4-D, boolean or additive, used as it is.
    restarting: positions (B or 1, S) that start at 0 within a row where another packed sequence begins; None with a cache.
    slots: (S,), the place of each query among the keys. seen: keys from earlier forwards.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        given = attention_mask[..., :keys]
        return given if given.dtype is torch.bool else given.eq(0)
    if not deferred(slots):
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        if restarting is not None and bool((restarting.diff() == 1).all()):
            restarting = None
    queries = slots.shape[0]
    unmasked = attention_mask is None and restarting is None
    if unmasked and isinstance(seen, int) and seen + queries == keys and (seen == 0 or queries == 1):
        return None
    order = torch.arange(keys, device=slots.device)
    mask = (order <= slots.unsqueeze(1))[None, None]
    if restarting is not None:
        first = torch.zeros_like(restarting[:, :1])
        sequence = torch.cat((first, restarting.diff().ne(1).to(first.dtype).cumsum(1)), dim=1)  # (B or 1, S)
        mask = mask & (sequence.unsqueeze(2) == sequence.unsqueeze(1)).unsqueeze(1)
    if attention_mask is not None:
        tokens = attention_mask.bool()[:, :keys]
        behind = keys - tokens.shape[1]  # of a static cache, not written yet
        if behind:
            tokens = torch.cat((tokens, tokens.new_ones(tokens.shape[0], behind)), dim=1)
        mask = mask & tokens[:, None, None]
    return mask


def check_config(config: LlamaConfig) -> None:
    """Raises ValueError, naming the numbers, for shapes that no Llama can have."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
        raise ValueError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embeddings turn pairs")
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config.hidden_act!r}: Llama's is silu")


def check_inputs(config: LlamaConfig, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Raises ValueError where ids and embeddings are both or neither given, or an id is outside the vocabulary."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds")
    if inputs_embeds is not None:
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != config.hidden_size:
            raise ValueError(f"inputs_embeds {tuple(inputs_embeds.shape)} is not (B, S, {config.hidden_size})")
        return
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)} is not (B, S)")
    if input_ids.numel() and not deferred(input_ids):
        low, high = (int(end) for end in input_ids.aminmax())
        if low < 0 or high >= config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside the vocabulary of {config.vocab_size}")


def check_mask(mask: Tensor | None, rows: int, queries: int, keys: int, seen: int | Tensor) -> None:
    """Raises ValueError for a mask of another batch or length."""
    if mask is None:
        return
    if mask.dim() not in (2, 4):
        raise ValueError(f"attention_mask {tuple(mask.shape)} is neither (B, T) nor (B, 1, S, T)")
    if mask.shape[0] not in (rows, 1 if mask.dim() == 4 else rows):
        raise ValueError(f"attention_mask {tuple(mask.shape)} is of another batch than the inputs' {rows} rows")
    shortest = seen + queries if isinstance(seen, int) else 0
    if mask.dim() == 2 and not shortest <= mask.shape[1] <= keys:
        raise ValueError(f"attention_mask is {mask.shape[1]} long, inputs with their cache {shortest or keys}")
    if mask.dim() == 4 and (mask.shape[2] != queries or mask.shape[3] < keys):
        raise ValueError(f"attention_mask {tuple(mask.shape)} does not fit {queries} queries and {keys} keys")


def check_labels(labels: Tensor, rows: int, length: int) -> None:
    """Raises ValueError for labels of another shape than the inputs (B, S)."""
    if tuple(labels.shape) != (rows, length):
        raise ValueError(f"labels {tuple(labels.shape)} are not of the inputs' shape {(rows, length)}")


def keys_of(cache: Any, slots: Tensor, seen: int | Tensor) -> int:
    """Keys that attention sees with `cache`: its whole length if static. Raises ValueError where it is too short."""
    length = getattr(cache, "get_max_cache_shape", lambda: None)()
    if not isinstance(length, int) or length <= 0:
        return int(seen) + slots.shape[0]
    if not deferred(slots) and int(slots[-1]) >= length:
        raise ValueError(f"the cache holds {length} tokens, {int(slots[-1]) + 1} are needed")
    return length
