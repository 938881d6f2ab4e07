"""Bytes of living tensors, followed op by op: real tensors or fake ones of any size.

A storage lives from the op that makes it to its last reference. With fake tensors (torch's FakeTensorMode) this gives the
peak of a 70B forward in seconds without its memory; with real tensors on a CPU it is what the allocator hands out.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
ROOT = str(Path(__file__).resolve().parents[1])


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


@dataclass(slots=True)
class Buffer:
    """One storage on a tape. It lives in the ops born, born + 1, ... died - 1; `died` is None while it lives."""

    size: int  # bytes
    born: int
    died: int | None = None
    op: str = ""
    module: str = ""
    line: str = ""  # of this project's source: file:number
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    kind: str = "temporary"


@dataclass(slots=True)
class Op:
    name: str
    module: str
    phase: str
    line: str
    scratch: int = 0  # bytes that its kernel takes and gives back


@dataclass(slots=True)
class Visit:
    """A module's forward: ops begin ... end - 1."""

    module: str
    begin: int
    end: int
    phase: str


class Tape(TorchDispatchMode):
    """Context manager: every op with module, source line and phase; every storage from its op to its last reference.

    `model` gives modules their names. No hook is set anywhere: a hook would close the gate of the in-place residual add.
    In backward an op belongs to the module whose forward made its autograd node. `kept`: for fake tensors, which have no values:
    rows that a boolean mask is taken to select, and `all()` of it is false; -1: `all()` is true. `scratch`: bytes that an op's
    kernel takes beside its results.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        kept: int | None = None,
        scratch: Callable[[Any, tuple, Any], int] | None = None,
    ) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.visits: list[Visit] = []
        self.breaks: list[tuple[int, str]] = []  # (op, cause): a graph ends before this op
        self.phase = ""
        self.phases: dict[str, int] = {}  # first op of each
        self.kept, self.scratch = kept, scratch
        self._names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._alive: dict[int, Buffer] = {}
        self._before: dict[int, bool] = {}
        self._nodes: dict[int, tuple[str, str]] = {}

    def __enter__(self) -> Tape:
        self._collecting = gc.isenabled()
        gc.disable()
        self._call = nn.Module.__call__
        nn.Module.__call__ = self._watched()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        nn.Module.__call__ = self._call
        if self._collecting:
            gc.enable()

    def enter_phase(self, phase: str) -> None:
        """What follows is of this phase."""
        self.phase = phase
        self.phases.setdefault(phase, len(self.ops))

    def cut(self, cause: str) -> None:
        """A graph ends here."""
        self.breaks.append((len(self.ops), cause))

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Buffers of these tensors are of this kind."""
        for tensor in tensors:
            if (buffer := self._alive.get(id(tensor.untyped_storage()))) is not None:
                buffer.kind = kind

    def live(self) -> list[int]:
        """Bytes of the tape's buffers while each op runs, its kernel's scratch included."""
        change = [0] * (len(self.ops) + 1)
        for buffer in self.buffers:
            change[buffer.born] += buffer.size
            if buffer.died is not None:
                change[min(buffer.died, len(self.ops))] -= buffer.size
        total, curve = 0, []
        for step, op in zip(change, self.ops, strict=False):
            total += step
            curve.append(total + op.scratch)
        return curve

    def _watched(self) -> Callable[..., Any]:
        call = self._call

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module))
            if name is None:
                return call(module, *args, **kwargs)
            visit = Visit(name, len(self.ops), -1, self.phase)
            self.visits.append(visit)
            self._stack.append(name)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._stack.pop()
                visit.end = len(self.ops)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        module, line = self._place()
        given = {id(tensor.untyped_storage()) for tensor in _tensors((*args, *kwargs.values()))}
        if self.kept is not None and func is aten._local_scalar_dense.default:
            return self._value(args[0])
        chosen = self.kept is not None and func is aten.index.Tensor and _boolean(args[1])
        result = self._chosen(*args) if chosen else func(*args, **kwargs)
        self.ops.append(Op(str(func), module, self.phase, line))
        for tensor in _tensors(result if isinstance(result, tuple | list) else (result,)):
            self._follow(tensor, given)
        if self.scratch is not None:
            self.ops[-1].scratch = self.scratch(func, args, result)
        return result

    def _value(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bool:
            return self.kept < 0
        if self.phase == "optimizer":
            return 1.0  # a count of steps, or a norm
        raise ValueError(f"a plan cannot know the value of a tensor ({tensor.dtype}, made at {self._place()[1]})")

    def _chosen(self, tensor: torch.Tensor, indices: list) -> torch.Tensor:
        return tensor.new_empty((self.kept, *tensor.shape[1:]))

    def _place(self) -> tuple[str, str]:
        line = _source_line()
        node = torch._C._current_autograd_node()
        inside = self._stack and (node is None or torch.is_grad_enabled() or line)
        module = self._stack[-1] if inside else ""
        if node is not None and not module:
            forward = self._nodes.get(node._sequence_nr())
            return (forward[0], line or forward[1]) if forward else ("", line)
        if torch.is_grad_enabled():
            self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, line))
        return module, line

    def _follow(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in given:
            return
        op = self.ops[-1]
        buffer = Buffer(
            storage.nbytes(), len(self.ops) - 1, None, op.name, op.module, op.line, op.phase,
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
        )  # fmt: skip
        self.buffers.append(buffer)
        self._alive[key] = buffer
        weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self._alive.pop(key).died = len(self.ops)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _boolean(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in indices)


def _source_line() -> str:
    """The innermost line of this project (or, failing that, of transformers or PEFT) that is being executed."""
    frame, other = sys._getframe(2), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and file != __file__ and "site-packages" not in file:
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        if not other and ("/transformers/models/" in file or "/peft/tuners/" in file):
            other = f"{file.rpartition('/site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return other


def allocator_peak(function: Callable[[], object], packed: bool = True) -> int:
    """Bytes that torch's CPU allocator had out at the most while `function` ran, beyond the start.

    `packed=False` leaves out what a matrix product takes and gives back within itself: on a CPU with AMX the kernels of
    bfloat16 pack the weights first, into as many bytes again; which products do, and in what blocks, is oneDNN's choice.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live = peak = end = 0
    for event in events:
        product = event.name() in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
        if not (product or event.name() == "[memory]"):
            continue
        if packed or event.start_ns() > end:
            peak = max(peak, live)  # what was out until now
        if product:
            end = event.end_ns()
        else:
            live += event.nbytes()
    return max(peak, live)
