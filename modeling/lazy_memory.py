"""What a tape takes where ops are collected into graphs, and what sharding adds to it. All sizes are bytes.

Lazy execution (Gaudi): ops wait until something cuts the graph; then it is compiled and run. What is born and dead inside one
graph lies in the graph's workspace, one buffer that grows to the largest graph's need and is never given back; everything else
is persistent from the graph that makes it to the last graph that uses it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass

from modeling.liveness import Buffer, Tape

LAYER = re.compile(r"\.\d+(?=\.|$)")
BY_SIZE, GATHERED = "compound size", "gathered weights"
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
        if first == final and buffer.died is not None and buffer.kind != GATHERED:
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


def lazy_peak(found: list[Graph], late: bool = False) -> tuple[int, int, int]:
    """(peak, index of its graph, workspace at the end): persistent memory and a workspace that only grows."""
    workspace, best, where = 0, -1, 0
    for n, graph in enumerate(found):
        workspace = max(workspace, graph.unshared if late else graph.workspace)
        persistent = graph.late if late else graph.persistent
        if persistent + workspace > best:
            best, where = persistent + workspace, n
    return best, where, workspace


# ZeRO-3 (Rajbhandari et al., 2020): weights are cut over the ranks and gathered around each module's use


@dataclass(frozen=True)
class Zero3:
    """DeepSpeed's settings, in numbers of parameters; its defaults."""

    persistence: int = 100_000  # smaller weights stay whole
    reuse: int = 1_000_000_000  # a weight that is used again within so many stays
    prefetch: int = 50_000_000  # gathered ahead
    live: int = 1_000_000_000  # nothing is gathered ahead beyond so many
    leaves: tuple[str, ...] = ()  # classes of modules that are gathered whole


def units(
    parameters: dict[str, list[tuple[int, int, bool]]], classes: dict[str, str], zero: Zero3
) -> dict[str, tuple[int, int]]:
    """(numbers, bytes) that are gathered together, by module."""
    found: dict[str, tuple[int, int]] = {}
    whole = [name for name, kind in classes.items() if kind in zero.leaves]
    for name, own in parameters.items():
        around = next((leaf for leaf in whole if name == leaf or name.startswith(f"{leaf}.")), name)
        large = [(numbers, size) for numbers, size, _ in own if numbers > zero.persistence]
        if large:
            numbers, size = found.get(around, (0, 0))
            found[around] = numbers + sum(n for n, _ in large), size + sum(s for _, s in large)
    return found


def gathers(tape: Tape, parameters: dict[str, tuple[int, int]], zero: Zero3) -> list[Buffer]:
    """parameters: of `units`. The whole weights of a step, each from its gathering to its release, as DeepSpeed's coordinator decides.

    A use is a module's forward, its repetition under a checkpoint, or its part of backward. Released after a use, unless the
    next one comes before `reuse` further parameters are used. While one is used, the next up to `prefetch` are gathered.
    """
    uses = _uses(tape, parameters)
    found: list[Buffer] = []
    held: dict[str, Buffer] = {}
    for n, (_, end, name, phase) in enumerate(uses):
        numbers, size = parameters[name]
        if (buffer := held.get(name)) is None:
            start = _ahead(uses, n, parameters, held, zero)
            buffer = held[name] = Buffer(size, start, end, "all_gather", name, "", phase, (numbers,), "", GATHERED)
            found.append(buffer)
        buffer.died = end
        if (again := _used_again(uses, n, parameters, zero.reuse)) is None:
            del held[name]
        else:
            buffer.died = uses[again][1]
    return found


def _uses(tape: Tape, cut_up: dict[str, tuple[int, int]]) -> list[tuple[int, int, str, str]]:
    """(begin, end, module, phase) of each use of a weight that is cut, in order."""
    uses = [(v.begin, max(v.end, v.begin + 1), v.module, v.phase) for v in tape.visits if v.module in cut_up]
    inside = [(v.begin, v.end) for v in tape.visits if v.module in cut_up]
    forward = {op for begin, end in inside for op in range(begin, end)}
    current: dict[str, list[int]] = {}
    for n, op in enumerate(tape.ops):
        if op.phase == "backward" and n not in forward and (owner := _owner(op.module, cut_up)):
            span = current.setdefault(owner, [n, n + 1])
            span[1] = n + 1
    # one backward of each module in a step: its span is whole
    uses += [(span[0], span[1], name, "backward") for name, span in current.items()]
    return sorted(uses)


def _owner(module: str, cut_up: dict) -> str:
    # the module itself, or the one around it that is gathered whole
    while module and module not in cut_up:
        module = module.rpartition(".")[0]
    return module


def _used_again(uses: list, n: int, parameters: dict, reuse: int) -> int | None:
    name, passed = uses[n][2], 0
    for later in range(n + 1, len(uses)):
        if passed >= reuse:
            return None
        if uses[later][2] == name:
            return later
        passed += parameters[uses[later][2]][0]
    return None


def _ahead(uses: list, n: int, parameters: dict, held: dict[str, Buffer], zero: Zero3) -> int:
    # The earliest use during which this weight is fetched ahead: what lies between is less than a bucket, and room is left
    present = sum(parameters[name][0] for name in held)
    place, between = n, 0
    while place > 0 and between < min(zero.prefetch, zero.live - present):
        place -= 1
        between += 0 if uses[place][2] in held else parameters[uses[place][2]][0]
    return uses[place][0]


def gather_breaks(found: Iterable[Buffer]) -> list[tuple[int, str]]:
    """A gathering is a collective, and runs what waits."""
    return [(buffer.born, f"gathering {buffer.module}") for buffer in found]


def with_added(tape: Tape, added: Iterable[Buffer]) -> list[int]:
    """`tape.live()` with buffers that are on no tape."""
    curve = tape.live()
    for buffer in added:
        for op in range(buffer.born, min(buffer.died, len(curve))):
            curve[op] += buffer.size
    return curve


__all__ = ["Graph", "Zero3", "cuts", "gather_breaks", "gathers", "graphs", "lazy_peak", "units", "with_added"]
