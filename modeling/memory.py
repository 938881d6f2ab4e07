"""What a step takes of a card, before there is one: `plan` runs the model's own code on tensors without data.

Static terms are counted from the model's parameters; what a step adds is followed op by op (modeling/liveness.py), sharding and
lazy graphs are modelled on that (modeling/lazy_memory.py). All sizes are bytes, for one rank.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig

from modeling import stand_ins
from modeling.lazy_memory import LAYER, Gathers, Graph, Zero3, cuts, gathers, graphs, lazy_peak, with_added
from modeling.liveness import Buffer, Tape, aten
from modeling.rehearsal import Build, Fuse, Rehearsal, Workload, on_meta, rehearse

MASTER_AND_MOMENTS = 12  # float32 copy, first and second moment of Adam
MOMENTS = 8  # Adam on float32 parameters needs no copy
# Layers that are traced of a deeper model; a step's memory is linear beyond (tests/modeling/test_plan.py)
DEPTHS = (3, 4)
FRACTION = re.compile(r"(?<=\.)\d+(?=\.|$)")


def linear_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear module of a decoder layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def layer_parameters(config: LlamaConfig) -> int:
    """Parameters of one decoder layer, its two norms and its biases included."""
    count = 2 * config.hidden_size
    for name, (inputs, outputs) in linear_shapes(config).items():
        biased = config.mlp_bias if name in ("gate_proj", "up_proj", "down_proj") else config.attention_bias
        count += inputs * outputs + (outputs if biased else 0)
    return count


def model_parameters(config: LlamaConfig) -> int:
    """Parameters of the whole model; a tied head counts once."""
    table = config.vocab_size * config.hidden_size
    tables = table if config.tie_word_embeddings else 2 * table
    return tables + config.num_hidden_layers * layer_parameters(config) + config.hidden_size


def lora_parameters(config: LlamaConfig, rank: int, targets: Iterable[str]) -> int:
    """Parameters of a LoRA adapter of one rank on `targets` (names of `linear_shapes`, or all-linear)."""
    shapes = linear_shapes(config)
    chosen = set(shapes) if "all-linear" in targets else {name for name in shapes if name in set(targets)}
    return config.num_hidden_layers * sum(rank * sum(shapes[name]) for name in chosen)


@dataclass(frozen=True)
class Setting:
    """Where a step runs. What is an assumption rather than a choice is echoed in `Plan.assumptions`."""

    device: str = "cpu"  # cpu, cuda, hpu
    lazy: bool = False
    ranks: int = 1  # that share states and, at stage 3, weights
    zero_stage: int | None = None  # None: no DeepSpeed
    zero3: Zero3 = field(default_factory=Zero3)
    shared: int = 1  # ranks of tensor parallelism; the model is already a rank's share
    offload_optimizer: bool = False  # to the host
    offload_weights: bool = False
    compound: int | None = None  # ops after which a lazy graph is cut (PT_HPU_MAX_COMPOUND_OP_SIZE)
    lazy_collectives: bool = False  # collectives are part of lazy graphs
    pipelined: bool = False  # a lazy graph ends between forward and backward
    lag: int = 8  # graphs that a device may be behind its host, in the high figure
    delay: int = 2  # ops until freed memory inside a graph is used again, in the high figure: two engines overlap
    softmax: str = ""  # attention's, in words


@dataclass(frozen=True)
class Live:
    """Tensors of one origin that are alive at the peak."""

    size: int  # bytes, all of them
    count: int
    op: str
    module: str  # * where a layer's number stood
    line: str
    shape: tuple[int, ...]
    dtype: str
    kind: str


@dataclass(frozen=True)
class GraphUse:
    """The lazy graph at which the nominal peak is reached."""

    count: int  # graphs of a step
    cause: str  # what ends it
    persistent: int
    workspace: int  # the one buffer, as grown until then


@dataclass
class Plan:
    """A step's memory on one card."""

    workload: Workload
    setting: Setting
    layers: int
    static: dict[str, int]  # there all the time, by term
    peak: dict[str, int]  # alive beside it at the op-by-op peak, by kind
    top: list[Live]
    eager: int  # static and peak: what op-by-op execution needs, and no execution less
    nominal: int  # lazy: persistent and workspace, memory inside a graph reused at once; else as eager
    high: int  # lazy: memory given back late, see Setting.delay and lazy_memory.Graph.late; else as eager
    end: int  # held after the step
    where: str  # op, module and line of the peak
    graph: GraphUse | None
    assumptions: dict[str, str]
    curve: list[dict[str, int]]  # bytes by kind over the ops of the deepest model traced, static terms not in it
    traced: int  # its layers

    @property
    def low(self) -> int:
        """The floor: nothing held longer than its last reference."""
        return self.eager

    def verdict(self, capacity: float) -> str:
        """fits, does not fit, or undecided where the band from low to high straddles `capacity` (bytes)."""
        return "fits" if self.high <= capacity else "does not fit" if self.low > capacity else "undecided"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the curve left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "curve"}
        plain = {name: _plain(value) for name, value in fields.items()}
        return plain | {"low": self.low, "unit": "bytes"}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def plan(
    build: Build,
    workload: Workload,
    setting: Setting,
    layers: int,
    fuse: Fuse | None = None,
    depths: tuple[int, int] = DEPTHS,
) -> Plan:
    """The memory of `workload` on a model of `layers` layers.

    build(n, cut) makes a rank's model of n layers on the meta device, with its execution, adapter and checkpointing, and calls
    cut(cause) where a lazy graph ends. A deeper model than `depths` is traced at these two and extended linearly.
    """
    if setting.zero_stage == 3:
        ahead = _layers_ahead(build, setting.zero3)
        depths = (depths[0] + ahead, depths[1] + ahead)
    traced = [layers] if layers <= depths[1] else list(depths)
    found = [_figures(build, workload, setting, depth, fuse) for depth in traced]
    last = found[-1]

    def at(name: str, key: str | None = None) -> int:
        values = [figures.numbers[name] if key is None else figures.numbers[name].get(key, 0) for figures in found]
        if len(values) == 1:
            return values[0]
        return values[0] + round((values[1] - values[0]) * (layers - traced[0]) / (traced[1] - traced[0]))

    static = {term: at("static", term) for term in last.numbers["static"]}
    peak = {kind: at("peak", kind) for kind in last.numbers["peak"]}
    # The highest place may be another in a deeper model: each is a straight line of its own
    shared = [place for place in last.numbers["high places"] if all(place in f.numbers["high places"] for f in found)]
    high = max(at("nominal"), *(at("high places", place) for place in shared))
    graph = None
    if setting.lazy:
        graph = GraphUse(at("graphs"), last.cause, at("persistent"), at("workspace"))
    return Plan(
        workload=workload, setting=setting, layers=layers, static=static, peak=peak, top=_extended(found, traced, layers),
        eager=at("eager"), nominal=at("nominal"), high=high, end=at("end"), where=last.where, graph=graph,
        assumptions=_assumptions(workload, setting, layers, traced), curve=last.curve, traced=traced[-1],
    )  # fmt: skip


def _layers_ahead(build: Build, zero: Zero3) -> int:
    """Layers that are gathered ahead: so many more have to be traced until one layer more is like the one before."""
    one, two = (sum(p.numel() for p in on_meta(build, depth).parameters()) for depth in (1, 2))
    layer = two - one
    # Where each use gathers no less than it takes, the lead grows until it is as long as it may be
    return zero.live // layer if zero.prefetch and (not zero.leaves or zero.prefetch >= layer) else 0


@dataclass
class _Figures:
    numbers: dict[str, Any]
    top: dict[tuple, Live]
    where: str
    cause: str
    curve: list[dict[str, int]]


def _figures(build: Build, workload: Workload, setting: Setting, layers: int, fuse: Fuse | None) -> _Figures:
    whole = setting.zero_stage == 3
    run = rehearse(
        build,
        workload,
        layers,
        scratch_of(setting.device),
        reads_values=setting.device != "hpu",
        fuse=fuse,
        zero3=whole,
    )
    tape = run.tape
    gathered = Gathers([], [])
    if whole:
        gathered = gathers(tape, run.parameters, run.classes, setting.zero3, staged=setting.device == "cpu")
    added = gathered.buffers
    curve = with_added(tape, added)
    static = _static(run, workload, setting)
    place = max(range(len(curve)), key=curve.__getitem__)
    numbers: dict[str, Any] = {"static": static, "eager": sum(static.values()) + curve[place]}
    numbers |= {
        "nominal": numbers["eager"],
        "high places": {"": numbers["eager"]},
        "end": sum(static.values()) + _left(tape),
    }
    cause = ""
    if setting.lazy:
        joined = {"collective": setting.lazy_collectives, "forward ends": not setting.pipelined}
        causes = [(op, cause) for op, cause in tape.breaks if not joined.get(cause)]
        ends = cuts(tape, [*causes, *gathered.breaks], setting.compound)
        found = graphs(tape, ends, added, setting.delay, setting.lag)
        base = sum(static.values())
        peak, where, held = lazy_peak(found)
        cause = found[where].cause
        numbers |= {
            "nominal": base + peak,
            "high places": _late_by_place(found, tape, base, layers),
            "end": base + held + _left(tape),
        }
        numbers |= {"persistent": base + found[where].persistent, "workspace": peak - found[where].persistent}
        numbers["graphs"] = len(found)
    alive = [b for b in (*tape.buffers, *added) if b.born <= place and (b.died is None or b.died > place)]
    numbers["peak"] = _by_kind(alive, tape) | (
        {"kernel scratch": tape.ops[place].scratch} if tape.ops[place].scratch else {}
    )
    op = tape.ops[place]
    where = " ".join(
        part for part in (op.name, f"in {FRACTION.sub('*', op.module)}" if op.module else "", op.line, op.phase) if part
    )
    return _Figures(numbers, _grouped(alive, tape), where, cause, _curve(tape, added))


def _late_by_place(found: list[Graph], tape: Tape, base: int, layers: int) -> dict[str, int]:
    """The high figure by phase and by the layer's distance from the nearer end of the model."""
    highest: dict[str, int] = {}
    workspace = 0
    for graph in found:
        workspace = max(workspace, graph.unshared)
        op = tape.ops[graph.begin]
        match = LAYER.search(op.module)
        number = int(match[0][1:]) if match else -1
        place = f"{op.phase} {min(number, layers - 1 - number) if match else op.module} {number < layers - 1 - number}"
        highest[place] = max(highest.get(place, 0), base + graph.late + workspace)
    return highest


def _left(tape: Tape) -> int:
    return sum(buffer.size for buffer in tape.buffers if buffer.died is None)


def _static(run: Rehearsal, workload: Workload, setting: Setting) -> dict[str, int]:
    static, stage, ranks = dict(run.static), setting.zero_stage, setting.ranks
    training = workload.kind == "training"
    every = [own for module in run.parameters.values() for own in module]
    trained = [(numbers, size) for numbers, size, wanted in every if wanted]
    adapter, adapter_bytes = sum(numbers for numbers, _ in trained), sum(size for _, size in trained)
    if stage is not None and training:
        copy = MOMENTS if stage == 0 and adapter_bytes == 4 * adapter else MASTER_AND_MOMENTS
        static["optimizer"] = _share(copy * adapter, ranks if stage else 1)
        if stage >= 2:
            static["gradient partition"] = _share(adapter_bytes, ranks)
    if setting.offload_optimizer:
        static.pop("optimizer", None)
    if stage == 3:
        # Cut over the ranks; what is small stays whole beside its part
        limit = setting.zero3.persistence
        small = {wanted: sum(s for n, s, w in every if w == wanted and n <= limit) for wanted in (False, True)}
        terms = {"weights": False, "adapter": True} if "adapter" in static else {"weights": bool(trained)}
        for term, wanted in terms.items():
            if term in static:
                part = 0 if setting.offload_weights else sum(_share(s, ranks) for _, s, w in every if w == wanted)
                static[term] = part + small[wanted]
    return {term: size for term, size in static.items() if size}


def _share(size: int, ranks: int) -> int:
    return math.ceil(size / ranks)


def _kind(buffer: Buffer, tape: Tape) -> str:
    if buffer.kind != "temporary":
        return buffer.kind
    if buffer.phase == "forward" and (buffer.died is None or buffer.died > tape.phases.get("backward", len(tape.ops))):
        return "kept for backward"
    return "activations"


def _by_kind(alive: Iterable[Buffer], tape: Tape) -> dict[str, int]:
    sums: dict[str, int] = {}
    for buffer in alive:
        kind = _kind(buffer, tape)
        sums[kind] = sums.get(kind, 0) + buffer.size
    return sums


def _grouped(alive: Iterable[Buffer], tape: Tape) -> dict[tuple, Live]:
    groups: dict[tuple, Live] = {}
    for b in alive:
        module = FRACTION.sub("*", b.module)
        key = (b.op, module, b.line, b.shape, b.dtype, _kind(b, tape))
        known = groups.get(key)
        size, count = (known.size, known.count) if known else (0, 0)
        groups[key] = Live(size + b.size, count + 1, b.op, module, b.line, b.shape, b.dtype, key[-1])
    return groups


def _extended(found: list[_Figures], traced: list[int], layers: int) -> list[Live]:
    groups = found[-1].top
    if len(found) > 1:
        share = (layers - traced[1]) / (traced[1] - traced[0])
        for key, live in groups.items():
            before = found[0].top.get(key)
            size, count = (before.size, before.count) if before else (live.size, live.count)
            more = round((live.size - size) * share), round((live.count - count) * share)
            groups[key] = dataclasses.replace(live, size=live.size + more[0], count=live.count + more[1])
    return sorted(groups.values(), key=lambda live: -live.size)


def _curve(tape: Tape, added: Iterable[Buffer]) -> list[dict[str, int]]:
    changes: dict[str, list[int]] = {}
    for buffer in (*tape.buffers, *added):
        change = changes.setdefault(_kind(buffer, tape), [0] * (len(tape.ops) + 1))
        change[buffer.born] += buffer.size
        if buffer.died is not None:
            change[min(buffer.died, len(tape.ops))] -= buffer.size
    sums, curve = dict.fromkeys(changes, 0), []
    for n in range(len(tape.ops)):
        for kind, change in changes.items():
            sums[kind] += change[n]
        curve.append(dict(sums))
    return curve


def scratch_of(device: str) -> Any:
    """The scratch of kernels, as far as it is known: torch's own on a CPU; Gaudi's by the stand-ins; none on CUDA."""
    return _cpu_scratch if device == "cpu" else stand_ins.scratch


def _cpu_scratch(func: Any, args: tuple, result: Any) -> int:
    # Pointwise kernels first turn operands of another type into the result's, each in a copy of its own
    if func in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor) and isinstance(
        args[1], torch.Tensor
    ):
        return sum(a.numel() * result.element_size() for a in args[:2] if a.dtype != result.dtype and a.dim())
    if func is aten.logsumexp.default:  # exp of the difference to the largest
        return args[0].nbytes
    return 0


def _assumptions(workload: Workload, setting: Setting, layers: int, traced: list[int]) -> dict[str, str]:
    said = {"targets": f"{workload.kept:,} of {workload.rows * workload.length:,} tokens have a label"}
    if workload.kind != "training":
        said = {}
    if workload.generating:
        said["KV length"] = f"{workload.keys:,} tokens a row"
    if setting.softmax:
        said["softmax"] = setting.softmax
    if len(traced) > 1:
        said["layers"] = f"{traced[0]} and {traced[1]} traced, {layers} by straight line"
    if setting.device == "cuda":
        said["kernel scratch"] = "none: a CUDA library's workspaces and the caching allocator's fragments are not in it"
    if setting.device == "hpu":
        said["accuracy"] = (
            "never held against this code on a card; other code's figures, measured: scripts/plan.py --measured"
        )
        if workload.kind == "training":
            said["accuracy"] += "; there the peak in training was 17 % above nominal"
        if workload.kind == "training":
            said["kernel scratch"] = "attention's backward without recompute: two more matrices of weights (B, N, S, T)"
    if setting.device == "cpu":
        said["kernel scratch"] = (
            "what torch's CPU kernels were seen to take; not what products in bfloat16 pack on CPUs with AMX"
        )
    if setting.shared > 1:
        said["vocabulary"] = f"embedding and head cut over {setting.shared} ranks"
    if setting.zero_stage == 3:
        z = setting.zero3
        said["ZeRO-3"] = (
            f"gathered around each module; kept when used again within {z.reuse:,} parameters; at each module {z.prefetch:,}"
            f" and more ahead, up to {z.live:,} in all; whole below {z.persistence:,}"
        )
    if setting.lazy:
        size = f", and every {setting.compound} ops" if setting.compound else ""
        inside = "inside graphs" if setting.lazy_collectives else "cut graphs"
        said["lazy graphs"] = f"cut at mark_step and gathers{size}; collectives {inside}"
        said["reuse"] = (
            f"nominal: at once; high: {setting.delay} ops after the last use, and between graphs when host and device"
            f" meet, {setting.lag} graphs later at the most; low: no graphs"
        )
    return said
