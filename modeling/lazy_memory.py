"""What a tape takes where ops are collected into graphs, and what sharding adds to it. All sizes are bytes.

Lazy execution (Gaudi): ops wait until something cuts the graph; then it is compiled and run. What is born and dead inside one
graph lies in the graph's workspace, one buffer that grows to the largest graph's need and is never given back; everything else
is persistent from the graph that makes it to the last graph that uses it.
"""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from modeling.liveness import Buffer, Tape

LAYER = re.compile(r"\.\d+(?=\.|$)")
BY_SIZE, GATHERED, STAGED = "compound size", "gathered weights", "collective's staging"
VIEWS = (
    "view",
    "t.default",
    "transpose",
    "expand",
    "slice",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "select",
    "split",
    "permute",
)


@dataclass(frozen=True)
class Graph:
    """One lazy graph: ops begin ... end - 1."""

    begin: int
    end: int
    cause: str  # of its end
    persistent: int  # bytes that are alive while it runs, without the workspace
    late: int  # the same where memory is given back only when host and device wait for each other
    workspace: int  # its own need, memory reused at once
    unshared: int  # the same where memory is free for reuse only `delay` ops after its last use


def cuts(tape: Tape, causes: Iterable[tuple[int, str]], compound: int | None) -> list[tuple[int, str]]:
    """Ends of graphs as (op, cause), in order: `causes`, and between them every `compound` ops that compute something.

    Counted anew from each layer on: where a count that runs on would cut differs from layer to layer, and so would the figures.
    """
    wanted = dict(sorted(causes, reverse=True))  # the first cause of a place
    found, waiting, layer = [], 0, ""
    for n, op in enumerate(tape.ops):
        before, layer = layer, (match[0] if (match := LAYER.search(op.module)) else layer)
        if n in wanted and n:
            found.append((n, wanted[n]))
            waiting = 0
        elif compound and (waiting == compound or (layer != before and waiting)):
            found.append((n, BY_SIZE))
            waiting = 0
        waiting += not _is_view(op.name)
    return [*found, (len(tape.ops), "the step ends")]


def _is_view(name: str) -> bool:
    return name.removeprefix("aten.").startswith(VIEWS)


def graphs(
    tape: Tape, ends: list[tuple[int, str]], added: Iterable[Buffer] = (), delay: int = 0, lag: int = 0
) -> list[Graph]:
    """Each graph's memory. lag: graphs that the device may be behind the host.

    added: buffers that are on no tape (gathered weights): always persistent.
    """
    places, last = [place for place, _ in ends], len(tape.ops)
    waits = _waits([cause for _, cause in ends])
    inside: list[list[Buffer]] = [[] for _ in places]
    soon, late = [0] * (len(places) + 1), [0] * (len(places) + 1)
    for buffer in (*tape.buffers, *added):
        first, final = _graph(places, buffer.born), len(places) - 1
        if buffer.died is not None:
            final = _graph(places, max(buffer.born, min(buffer.died, last) - 1))
        if first == final and buffer.died is not None and buffer.kind not in (GATHERED, STAGED):
            inside[first].append(buffer)
            continue
        for change, end in ((soon, final), (late, min(waits[final], final + lag))):
            change[first] += buffer.size
            change[end + 1] -= buffer.size
    result, alive, held, begin = [], 0, 0, 0
    for n, (end, cause) in enumerate(ends):
        alive, held = alive + soon[n], held + late[n]
        scratch = [(op, tape.ops[op].scratch) for op in range(begin, end) if tape.ops[op].scratch]
        near, far = (_peak(inside[n], scratch, end, wait) for wait in (0, delay))
        result.append(Graph(begin, end, cause, alive, held, near, far))
        begin = end
    return result


def _waits(causes: list[str]) -> list[int]:
    """For each graph, the next one that ends where host and device meet: all but those cut by size."""
    found, meeting = [0] * len(causes), len(causes) - 1
    for n in range(len(causes) - 1, -1, -1):
        meeting = n if causes[n] != BY_SIZE else meeting
        found[n] = meeting
    return found


def _graph(places: list[int], op: int) -> int:
    return min(bisect.bisect_right(places, op), len(places) - 1)


def _peak(buffers: list[Buffer], scratch: list[tuple[int, int]], end: int, wait: int) -> int:
    change: dict[int, int] = {}
    for buffer in buffers:
        change[buffer.born] = change.get(buffer.born, 0) + buffer.size
        died = min(max(buffer.died, buffer.born + 1) + wait, end)
        change[died] = change.get(died, 0) - buffer.size
    for op, size in scratch:
        change[op] = change.get(op, 0) + size
        change[op + 1] = change.get(op + 1, 0) - size
    live = peak = 0
    for place in sorted(change):
        live += change[place]
        peak = max(peak, live)
    return peak


def lazy_peak(found: list[Graph]) -> tuple[int, int, int]:
    """(peak, index of its graph, workspace at the end): persistent memory and a workspace that only grows."""
    workspace, best, where = 0, -1, 0
    for n, graph in enumerate(found):
        workspace = max(workspace, graph.workspace)
        if graph.persistent + workspace > best:
            best, where = graph.persistent + workspace, n
    return best, where, workspace


# ZeRO-3 (Rajbhandari et al., 2020): weights are cut over the ranks and gathered around each module's use


@dataclass(frozen=True)
class Zero3:
    """DeepSpeed's settings, in numbers of parameters; its defaults."""

    persistence: int = 100_000  # smaller weights stay whole
    reuse: int = 1_000_000_000  # a weight that is used again within so many stays
    prefetch: int = 50_000_000  # gathered ahead, at least
    live: int = 1_000_000_000  # nothing is gathered ahead beyond so many
    leaves: tuple[str, ...] = ()  # classes of modules that are gathered whole


Weight = tuple[str, int]  # module, and its place among what is gathered with it


def units(
    parameters: dict[str, list[tuple[int, int, bool]]], leaves: list[str], zero: Zero3
) -> dict[str, list[tuple[int, int]]]:
    """(numbers, bytes) of each weight that is gathered, by the module that they are gathered for; adapters last, as they are made."""
    found: dict[str, list[tuple[int, int]]] = {}
    late: dict[str, list[tuple[int, int]]] = {}
    for name, own in parameters.items():
        around = next((leaf for leaf in leaves if name == leaf or name.startswith(f"{leaf}.")), name)
        for numbers, size, trained in own:
            if numbers > zero.persistence:
                (late if trained else found).setdefault(around, []).append((numbers, size))
    return {name: found.get(name, []) + late.get(name, []) for name in (*found, *(n for n in late if n not in found))}


@dataclass
class _Gather:
    """One collective: its buffer, out of which each weight is copied when the first of them is wanted."""

    weights: list[Weight]
    flat: Buffer | None  # None: a single weight lies in it and is not copied
    left: int  # weights not asked for yet; DeepSpeed's handle holds the buffer until the last is
    copied: bool = False


@dataclass
class Gathers:
    """The whole weights of a step, and the ops before which a collective runs."""

    buffers: list[Buffer]
    breaks: list[tuple[int, str]]


def gathers(
    tape: Tape,
    parameters: dict[str, list[tuple[int, int, bool]]],
    classes: dict[str, str],
    zero: Zero3,
    staged: bool = False,
) -> Gathers:
    """What DeepSpeed's coordinator (runtime/zero/partitioned_param_coordinator.py) gathers in a step.

    parameters: (numbers, bytes, trained) of each module's own, in order; classes: its class's name. A use is a module's forward,
    its repetition under a checkpoint, or its part of backward. It gathers what is not there, in one collective, and copies each
    weight out of it; then gathers ahead, in the order of use: weights of `prefetch` numbers at least, each time, until `live` are
    there. Released after a use, unless the next one comes before `reuse` further numbers are used.
    staged: the collective takes a second buffer of the same size while it runs (gloo).
    """
    leaves = [name for name, kind in classes.items() if kind in zero.leaves]
    weights = units(parameters, leaves, zero)
    return _Coordinator(_uses(tape, weights, leaves), weights, zero, staged).step()


class _Coordinator:
    def __init__(
        self,
        uses: list[tuple[int, int, str, str]],
        parameters: dict[str, list[tuple[int, int]]],
        zero: Zero3,
        staged: bool,
    ) -> None:
        self.uses, self.parameters, self.zero, self.staged = uses, parameters, zero, staged
        self.last = max((end for _, end, _, _ in uses), default=0)
        self.queue = deque((n, weight) for n, use in enumerate(self.uses) for weight in self._weights(use[2]))
        self.there: dict[Weight, Buffer] = {}
        self.running: dict[Weight, _Gather] = {}
        self.passed: dict[Weight, int] = {}  # the last use that gathering ahead has gone by
        self.found = Gathers([], [])

    def step(self) -> Gathers:
        for n, (begin, end, name, phase) in enumerate(self.uses):
            own = self._weights(name)
            self._gather([w for w in own if w not in self.there and w not in self.running], begin, begin, phase)
            for weight in own:
                self._wait(weight, begin, phase)
                self.there[weight].died = end
            self._ahead(n, begin, min(begin + 1, end - 1), phase)
            again = self._used_again(n)
            for weight in own:
                if again or self.passed.get(weight, n) > n:
                    self.there[weight].died = self.last  # until another use says otherwise
                else:
                    del self.there[weight]
        return self.found

    def _weights(self, name: str) -> list[Weight]:
        return [(name, n) for n in range(len(self.parameters.get(name, ())))]

    def _numbers(self, weight: Weight) -> int:
        return self.parameters[weight[0]][weight[1]][0]

    def _buffer(self, size: int, born: int, died: int, op: str, module: str, phase: str, kind: str) -> Buffer:
        buffer = Buffer(size, born, died, op, module, "", phase, (), "", kind)
        self.found.buffers.append(buffer)
        return buffer

    def _gather(self, weights: list[Weight], place: int, born: int, phase: str) -> None:
        if not weights:
            return
        name = weights[0][0]
        size = sum(self.parameters[w[0]][w[1]][1] for w in weights)
        self.found.breaks.append((place, f"gathering {name}"))
        if self.staged and born > place:  # else it is gone before the copies, which are as large, are made
            self._buffer(size, born, born + 1, "collective", name, phase, STAGED)
        flat = self._buffer(size, born, born + 1, "all_gather", name, phase, GATHERED)
        if len(weights) == 1:
            self.there[weights[0]] = flat
            flat = None
        gather = _Gather(weights, flat, len(weights))
        self.running.update(dict.fromkeys(weights, gather))

    def _wait(self, weight: Weight, place: int, phase: str) -> None:
        gather = self.running.pop(weight, None)
        if gather is None:
            return
        gather.left -= 1
        if gather.flat is None:
            return
        if not gather.copied:
            gather.copied = True
            for name, n in gather.weights:
                size = self.parameters[name][n][1]
                self.there[name, n] = self._buffer(size, place, self.last, "cat", name, phase, GATHERED)
        gather.flat.died = max(gather.flat.born, place) + 1 if not gather.left else self.last

    def _ahead(self, n: int, place: int, born: int, phase: str) -> None:
        while self.queue and self.queue[0][0] <= n:
            self.queue.popleft()
        present = sum(self._numbers(weight) for weight in self.there.keys() | self.running.keys())
        taken, numbers = [], 0
        while self.queue and numbers < min(self.zero.prefetch, self.zero.live - present):
            use, weight = self.queue.popleft()
            self.passed[weight] = use
            if weight not in self.there and weight not in self.running and weight not in taken:
                taken.append(weight)
                numbers += self._numbers(weight)
        self._gather(taken, place, born, phase)

    def _used_again(self, n: int) -> bool:
        name, passed = self.uses[n][2], 0
        for _, _, other, _ in self.uses[n + 1 :]:
            if passed >= self.zero.reuse:
                return False
            if other == name:
                return True
            passed += sum(numbers for numbers, _ in self.parameters.get(other, ()))
        return False


def _uses(tape: Tape, weights: dict, leaves: list[str]) -> list[tuple[int, int, str, str]]:
    """(begin, end, module, phase) of each module's forward, and of backward those of modules that have a weight which is cut."""
    inside = tuple(f"{leaf}." for leaf in leaves)
    visits = [v for v in tape.visits if not v.module.startswith(inside)]
    uses = [(v.begin, max(v.end, v.begin + 1), v.module, v.phase) for v in visits]
    forward = {op for v in visits if v.module in weights for op in range(v.begin, v.end)}
    current: dict[str, list[int]] = {}
    for n, op in enumerate(tape.ops):
        if op.phase == "backward" and n not in forward and (owner := _owner(op.module, weights)):
            span = current.setdefault(owner, [n, n + 1])
            span[1] = n + 1
    # one backward of each module in a step: its span is whole
    uses += [(span[0], span[1], name, "backward") for name, span in current.items()]
    return sorted(uses, key=lambda use: (use[0], -use[1]))


def _owner(module: str, cut_up: dict) -> str:
    # the module itself, or the one around it that is gathered whole
    while module and module not in cut_up:
        module = module.rpartition(".")[0]
    return module


def with_added(tape: Tape, added: Iterable[Buffer]) -> list[int]:
    """`tape.live()` with buffers that are on no tape."""
    curve = tape.live()
    for buffer in added:
        for op in range(buffer.born, min(buffer.died, len(curve))):
            curve[op] += buffer.size
    return curve


__all__ = ["Gathers", "Graph", "Zero3", "cuts", "gathers", "graphs", "lazy_peak", "with_added"]
