"""Which ranks share a model, which share out the rows, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.pipeline.config import GenerateConfig
from recipes.pipeline.runtime import Runtime


@dataclass(frozen=True)
class Ranks:
    """Groups of ranks that hold one model together; rows are dealt over the groups.

    lockstep: a forward needs every rank (ZeRO-3 gathers weights in it), so all run the same number of forwards.
    """

    group: int = 0
    groups: int = 1
    lockstep: bool = False
    device: torch.device | None = None

    @classmethod
    def of(cls, runtime: Runtime, options: GenerateConfig, model: nn.Module) -> Ranks:
        shared = options.tensor_parallel
        cut = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        return cls(runtime.rank // shared, runtime.world_size // shared, cut and runtime.world_size > 1, runtime.device)

    def any(self, own: bool) -> bool:
        """Whether it holds on any rank, where ranks keep step; else this rank's own answer."""
        if not self.lockstep:
            return own
        flag = torch.tensor([float(own)], device=self.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def gather(self, own: dict[int, Any]) -> dict[int, Any]:
        """The dictionaries of all ranks as one, on every rank. Collective."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return own
        parts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(parts, own)
        return {place: value for part in parts for place, value in part.items()}
