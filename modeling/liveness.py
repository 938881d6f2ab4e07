"""Bytes of living tensors, followed op by op: real tensors or fake ones of any size.

A storage lives from the op that makes it to its last reference. With fake tensors (torch's FakeTensorMode) this gives the
peak of a 70B forward in seconds without its memory; with real tensors on a CPU it is what the allocator hands out.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LivePeak(TorchDispatchMode):
    """Context manager; afterwards `peak` is the most bytes that tensors made inside held at one time, `op` where that was.

    Tensors that existed before (weights, inputs) do not count. The garbage collector is off inside: reference counts decide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.op = ""
        self._known: dict[int, int] = {}

    def __enter__(self) -> LivePeak:
        gc.collect()
        self._collecting = gc.isenabled()
        gc.disable()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._collecting:
            gc.enable()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage(), inputs)
        if self.live > self.peak:
            self.peak, self.op = self.live, str(func)
        return result

    def _follow(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in inputs:
            return
        self._known[key] = storage.nbytes()
        self.live += self._known[key]
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def allocator_peak(function: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator had out at the most while `function` ran, beyond the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
