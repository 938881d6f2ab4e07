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


class ReusedKeyValues(StaticKeyValues):
    """One allocation for all batches of a run: a batch may have fewer rows and fewer tokens than there is room for.

    whole: attention always sees all T slots, one shape for every step, as graphs need it; else exactly the filled ones. A forward
    that fills an empty cache attends to its own keys only, so that a causal kernel needs no mask.
    `position` is the caller's to move after a forward (`position.add_(S)`), outside of anything compiled.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        whole: bool = False,
    ) -> None:
        super().__init__(config, batch, length, dtype, device)
        self.whole = whole
        self.rows, self.filled, self.empty = batch, 0, True

    def begin(self, rows: int) -> None:
        """Forget everything; the next batch has `rows` rows."""
        self.reset()
        self.rows, self.filled, self.empty = rows, 0, True

    def update(self, key: Tensor, value: Tensor, layer: int, options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Write (B, K, S, D); what attention is to see is returned."""
        keys, values = self.keys[layer], self.values[layer]
        if self.rows < keys.shape[0]:
            keys, values = keys[: self.rows], values[: self.rows]
        if self.whole:
            positions = options["cache_position"]
            keys.index_copy_(2, positions, key.to(keys.dtype))
            values.index_copy_(2, positions, value.to(values.dtype))
            return (key, value) if self.empty else (keys, values)
        count = key.shape[2]
        keys.narrow(2, self.filled, count).copy_(key)
        values.narrow(2, self.filled, count).copy_(value)
        if self.empty:
            return key, value
        end = self.filled + count
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, tokens: int) -> None:
        self.empty = False
        if not self.whole:
            self.filled += tokens

    def get_seq_length(self, layer: int = 0) -> int | Tensor:
        return 0 if self.empty else self.position if self.whole else self.filled

    def get_max_cache_shape(self) -> int | None:
        """Keys that attention sees, where that is not simply the filled ones."""
        return self.length if self.whole and not self.empty else None

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows that `rows` (n,) lists, in this order."""
        count, filled = rows.shape[0], self.length if self.whole else self.filled
        for part in (*self.keys, *self.values):
            part[:count, :, :filled] = part[:, :, :filled].index_select(0, rows)
        self.rows = count
