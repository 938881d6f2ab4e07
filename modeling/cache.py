"""Static key/value cache: tensors of a fixed shape and a position that is a tensor, so that each decoding step is one graph."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig


class StaticKeyValues:
    """Keys and values (B, K, T, D) of every layer, allocated once; `reset` makes it ready for the next batch.

    Used like transformers' caches by LlamaForCausalLM, and told where to write by positions (S,) on the device.
    """

    is_compileable = True

    def __init__(
        self,
        config: LlamaConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, length, head_dim)
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.position = torch.zeros((), dtype=torch.long, device=device)  # tokens seen so far

    def update(self, key: Tensor, value: Tensor, layer: int, options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Write (B, K, S, D) at options["cache_position"] (S,); the whole (B, K, T, D) is returned."""
        positions = options["cache_position"]
        self.keys[layer].index_copy_(2, positions, key.to(self.keys[layer].dtype))
        self.values[layer].index_copy_(2, positions, value.to(self.values[layer].dtype))
        return self.keys[layer], self.values[layer]

    def advance(self, tokens: int) -> None:
        """`tokens` more have been written to every layer."""
        self.position.add_(tokens)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.position.zero_()

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """Tokens seen so far, as a 0-d tensor: no host synchronisation."""
        return self.position

    def get_max_cache_shape(self) -> int:
        return self.length

    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
