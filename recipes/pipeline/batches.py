"""Rows of a data set and batches of tensors: joining, packing, padding. Labels pass through as they are.

Legend: B rows of a batch, S padded length in tokens. A sample or row has input_ids and labels (same length, -100: no
target). Nothing predicts the first token of a row, or of a packed sequence, so its label is -100. Packed rows also have
position_ids, which restart at 0 with each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.pipeline.config import Batching, LoraRecipe, Side

if TYPE_CHECKING:
    import datasets
    import torch

IGNORED = -100  # label of a token that is no target
Row = dict[str, Any]


@dataclass(frozen=True)
class Collator:
    """Rows -> batch: input_ids, attention_mask, labels (B, S) int64, for packed rows position_ids too.

    Added positions get the pad id, label -100, attention 0 and position 0. No label depends on an id: an eos that is also
    the pad token stays a target. In a packed row a sequence begins wherever position_ids is 0.
    """

    pad_token_id: int
    pad_to_multiple_of: int  # tokens
    padding_side: str  # left, right
    max_length: int  # tokens; no row is padded beyond it
    pad_to_max_length: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        length = padded_length(max(len(row["input_ids"]) for row in rows), self)
        columns = {"input_ids": self.pad_token_id, "labels": IGNORED}
        if "position_ids" in rows[0]:
            columns["position_ids"] = 0
        batch = {name: np.full((len(rows), length), fill, np.int64) for name, fill in columns.items()}
        batch["attention_mask"] = np.zeros((len(rows), length), np.int64)
        for n, row in enumerate(rows):
            size = len(row["input_ids"])
            where = slice(length - size, length) if self.padding_side == "left" else slice(size)
            batch["attention_mask"][n, where] = 1
            for name in columns:
                batch[name][n, where] = row[name]
        return {name: torch.from_numpy(values) for name, values in batch.items()}


def padded_length(longest: int, collator: Collator) -> int:
    """Tokens of a batch whose longest row has `longest`."""
    if collator.pad_to_max_length:
        return max(longest, collator.max_length)
    multiple = collator.pad_to_multiple_of
    return max(longest, min(-(-longest // multiple) * multiple, collator.max_length))


def plain(samples: Iterable[Row]) -> list[Row]:
    """One row a sample."""
    return [_row(sample["input_ids"], sample["labels"]) for sample in samples]


def _row(ids: list[int], labels: list[int]) -> Row:
    return {"input_ids": ids, "labels": [IGNORED, *labels[1:]], "length": len(ids)}


def concatenated(samples: Iterable[Row], size: int) -> tuple[list[Row], int]:
    """All samples joined without boundaries and cut into rows of `size` tokens, and the tokens left over, which are dropped.

    A sample's first token is a target of the sample before it, as it was in the measured 70B run; a row's first is none.
    """
    samples = list(samples)
    ids = [i for sample in samples for i in sample["input_ids"]]
    labels = [label for sample in samples for label in sample["labels"]]
    starts = range(0, len(ids) - size + 1, size)
    return [_row(ids[n : n + size], labels[n : n + size]) for n in starts], len(ids) % size


def packed(samples: Sequence[Row], size: int) -> list[Row]:
    """First-fit: each sample, longest first, goes whole into the first row of at most `size` tokens that has room."""
    members: list[list[Row]] = []
    for sample, row in zip(ordered := _longest_first(samples), first_fit(map(_length, ordered), size), strict=True):
        if row == len(members):
            members.append([])
        members[row].append(sample)
    return [_pack(row) for row in members]


def _length(sample: Row) -> int:
    return len(sample["input_ids"])


def _longest_first(samples: Sequence[Row]) -> list[Row]:
    return sorted(samples, key=_length, reverse=True)


def _pack(samples: list[Row]) -> Row:
    ids = [i for sample in samples for i in sample["input_ids"]]
    labels = [label for sample in samples for label in (IGNORED, *sample["labels"][1:])]
    return {**_row(ids, labels), "position_ids": [n for sample in samples for n in range(_length(sample))]}


def first_fit(lengths: Iterable[int], size: int) -> list[int]:
    """Bin of each length: the first with room, a new one if there is none. n log n, by a tree of the most room left."""
    lengths = list(lengths)
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [size] * (2 * leaves)  # node n has children 2n and 2n+1; leaves are bins, in order
    bins = []
    for length in lengths:
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        bins.append(node - leaves)
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def blank_rows(dataset: datasets.Dataset, multiple: int) -> datasets.Dataset:
    """The data set and as many copies of its first row without targets as make its length a multiple of `multiple`.

    Ranks then get equally many rows, and no target is counted twice.
    """
    import datasets

    missing = -len(dataset) % multiple if len(dataset) else 0
    if not missing:
        return dataset
    row = {**dataset[0], "labels": [IGNORED] * len(dataset[0]["labels"])}
    blank = datasets.Dataset.from_list([row] * missing, features=dataset.features)
    return datasets.concatenate_datasets([dataset, blank])


def padding_share(lengths: Sequence[int], cfg: LoraRecipe, collator: Collator, rows: int) -> float:
    """Share of padding in batches of `rows` rows, formed as the trainer's own sampler does in a first epoch of one rank."""
    if not lengths:
        return 0.0
    order = list(range(len(lengths)))
    if cfg.train.group_by_length and cfg.data.batching is Batching.padded:
        import torch
        from transformers.trainer_pt_utils import get_length_grouped_indices

        order = get_length_grouped_indices(list(lengths), rows, generator=torch.Generator().manual_seed(cfg.seed))
    batches = [[lengths[i] for i in order[n : n + rows]] for n in range(0, len(order), rows)]
    total = sum(padded_length(max(batch), collator) * len(batch) for batch in batches)
    return 1 - sum(lengths) / total


def collator_for(cfg: LoraRecipe, pad_token_id: int) -> Collator:
    data = cfg.data
    side = "left" if data.padding_side is Side.left else "right"
    return Collator(pad_token_id, data.pad_to_multiple_of, side, data.max_seq_length, data.pad_to_max_length)
