"""The order of training rows: decided by seed and epoch alone, so that a resumed run goes on where the first one stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers.trainer_pt_utils import get_length_grouped_indices


class EpochSampler(torch.utils.data.Sampler[int]):
    """A permutation of the first `rows` indices for each epoch, then the blank rows behind them, which fill the last batch.

    `lengths` with `group` puts rows of like length into one group of that many rows. The trainer calls `set_epoch`.
    """

    def __init__(self, rows: int, blank: int, seed: int, lengths: Sequence[int] | None = None, group: int = 1) -> None:
        self.rows, self.blank, self.seed = rows, blank, seed
        self.lengths, self.group = lengths, group
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows + self.blank

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        if self.lengths is None:
            yield from torch.randperm(self.rows, generator=generator).tolist()
        else:
            lengths = list(self.lengths[: self.rows])
            yield from get_length_grouped_indices(lengths, min(self.group, self.rows), generator=generator)
        yield from range(self.rows, self.rows + self.blank)
