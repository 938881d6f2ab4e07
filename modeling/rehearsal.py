"""One step of a run - training, evaluation, a prompt, a decoding step - on real tensors, or on fake ones of any size.

The same function runs both: with real tensors it is what the allocator is measured on, with fake ones (torch's FakeTensorMode)
it is what a plan is made from. B rows, S tokens of a row, T length of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from modeling.cache import ReusedKeyValues
from modeling.decoding import FusedDecoder
from modeling.liveness import Tape, aten
from modeling.stand_ins import in_place_of_gaudi, in_place_of_zero3

KINDS = ("training", "evaluation", "prompt", "decoding")
Cut = Callable[[str], None]  # ends a lazy graph, with its cause
Build = Callable[[int, Cut], nn.Module]  # (layers, cut) -> the model of a rank, its execution and adapter bound


@dataclass(frozen=True)
class Workload:
    """What a step is given. Raises ValueError, in one line, for what cannot be."""

    kind: str  # one of KINDS
    rows: int  # B
    length: int  # S: tokens of a row; of the prompt when decoding
    keys: int = 0  # T: tokens that the static cache has room for; 0: no cache
    masked: bool = False  # a padding mask is given
    packed: bool = False  # several records a row, by position ids
    targets: int | None = None  # tokens with a label; None: all but each row's last
    logits: int = 1  # last positions whose scores are wanted, without labels
    chunk: int = 0  # prompt tokens a forward; 0: all
    whole: bool = True  # attention sees the whole cache (one shape for graphs), not just what is filled
    accumulated: bool = False  # gradients of an earlier micro-batch are there
    clip: bool = True  # gradients are clipped by their norm
    optimizer: bool = True  # torch's AdamW runs inside; False: the engine's, counted by arithmetic

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"workload {self.kind!r} is not one of: {', '.join(KINDS)}")
        for name in ("rows", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: a step needs 1 or more")
        if self.generating and self.keys < self.length:
            raise ValueError(f"a cache of {self.keys} tokens cannot hold {self.length}")

    @property
    def generating(self) -> bool:
        return self.kind in ("prompt", "decoding")

    @property
    def kept(self) -> int:
        """Rows of the loss that have a target."""
        return self.rows * (self.length - 1) if self.targets is None else self.targets


@dataclass
class Stage:
    """A model and what it is given, ready: `step(phase)` runs once, naming its phases."""

    model: nn.Module
    static: dict[str, list[Tensor]]  # tensors that are there before, by term
    step: Callable[[Callable[[str], None]], None]
    trained: list[nn.Parameter] = field(default_factory=list)


Fuse = Callable[[nn.Module, int], FusedDecoder | None]


def prepare(
    model: nn.Module, workload: Workload, device: str = "cpu", cut: Cut | None = None, fuse: Fuse | None = None
) -> Stage:
    """Inputs, cache and optimizer of a step. `fuse`: makes the decoder that runs in the model's place, if one does."""
    if workload.kind == "training":
        return _training(model, workload, device, cut or (lambda cause: None))
    if workload.kind == "evaluation":
        return _evaluation(model, workload, device)
    return _generation(model, workload, device, fuse)


def _weights(model: nn.Module) -> dict[str, list[Tensor]]:
    parameters = list(model.parameters())
    return {
        "weights": [p for p in parameters if not p.requires_grad],
        "adapter" if any(not p.requires_grad for p in parameters) else "weights": [
            p for p in parameters if p.requires_grad
        ],
        "buffers": list(model.buffers()),
    }


def _inputs(workload: Workload, device: str) -> dict[str, Tensor]:
    shape = workload.rows, workload.length
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.long, device=device)}
    inputs["labels"] = torch.zeros(shape, dtype=torch.long, device=device)
    if workload.masked:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long, device=device)
        inputs["attention_mask"][:, -1] = 0
    if workload.packed:
        half = workload.length // 2  # two records a row
        order = torch.cat((torch.arange(half), torch.arange(workload.length - half))).to(device)
        inputs["position_ids"] = order.repeat(workload.rows, 1)
    if workload.targets is not None and type(inputs["labels"]) is Tensor:
        flat = torch.full((workload.rows * workload.length,), -100)
        places = (
            torch.arange(1, workload.length).repeat(workload.rows)
            + torch.arange(workload.rows).repeat_interleave(workload.length - 1) * workload.length
        )
        flat[places[: workload.targets]] = 0
        inputs["labels"] = flat.view(shape).to(device)
    return inputs


def _training(model: nn.Module, workload: Workload, device: str, cut: Cut) -> Stage:
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    inputs = _inputs(workload, device)
    count = torch.ones((), dtype=torch.long, device=device)
    static = _weights(model) | {"inputs": [*inputs.values(), count]}
    optimizer = None
    if workload.optimizer:
        optimizer = torch.optim.AdamW(trained, lr=0.0)
        for parameter in trained:  # the states are made in the first step
            parameter.grad = torch.zeros_like(parameter)
        with _known_scalars():
            optimizer.step()
        static["optimizer"] = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    if workload.accumulated:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        static["gradients"] = [parameter.grad for parameter in trained]
    else:
        for parameter in trained:
            parameter.grad = None

    def step(phase: Callable[[str], None]) -> None:
        phase("forward")
        loss = model(**inputs, num_items_in_batch=count).loss
        cut("forward ends")
        phase("backward")
        loss.backward()
        phase("optimizer")
        cut("backward ends")
        if optimizer is not None:
            if workload.clip:
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            for parameter in trained:
                parameter.grad = None

    return Stage(model, static, step, trained)


def _evaluation(model: nn.Module, workload: Workload, device: str) -> Stage:
    model.eval()
    inputs = _inputs(workload, device)
    nothing = torch.empty(0, dtype=torch.long, device=device)

    def step(phase: Callable[[str], None]) -> None:
        phase("forward")
        with torch.no_grad():
            model(**inputs, logits_to_keep=nothing)

    return Stage(model, _weights(model) | {"inputs": [*inputs.values(), nothing]}, step)


def _generation(model: nn.Module, workload: Workload, device: str, fuse: Fuse | None) -> Stage:
    model.eval()
    rows, length = workload.rows, workload.length
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    cache = ReusedKeyValues(model.config, rows, workload.keys, dtype, device, whole=workload.whole)
    fused = fuse(model, workload.keys) if fuse is not None else None
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    masked = workload.whole or workload.masked
    mask = torch.ones(rows, workload.keys, dtype=torch.bool, device=device) if masked else None
    if workload.masked:
        mask[0, 0] = False
    static = _weights(model) | {"KV cache": [*cache.keys, *cache.values], "inputs": [ids, *([mask] if masked else [])]}
    if fused is not None:
        static["tables"] = list(fused.tables)

    def forward(start: int, count: int, wanted: bool) -> None:
        slots = torch.arange(start, start + count, device=device)
        kept = torch.tensor([count - 1] if wanted else [], dtype=torch.long, device=device)
        seen = mask
        if mask is not None and (start == 0 or not workload.whole):
            seen = mask[:, : start + count]
        places = slots.unsqueeze(0).expand(rows, -1)
        if fused is not None:
            fused(ids[:, :count], seen, places, cache)
            return
        model(
            input_ids=ids[:, :count], attention_mask=seen if workload.masked or start else None, position_ids=places,
            past_key_values=cache, cache_position=slots, logits_to_keep=kept, use_cache=True,
        )  # fmt: skip

    def step(phase: Callable[[str], None]) -> None:
        cache.begin(rows)
        with torch.inference_mode(fused is not None), torch.no_grad():
            if workload.kind == "decoding":
                cache.empty, cache.filled = False, length - 1
                phase("decoding")
                return forward(length - 1, 1, True)
            phase("prompt")
            size = workload.chunk or length
            for start in range(0, length, size):
                forward(start, min(size, length - start), start + size >= length)

    return Stage(model, static, step)


class _known_scalars(torch.utils._python_dispatch.TorchDispatchMode):
    """The optimizer reads its step count: 1 where there are no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is aten._local_scalar_dense.default and type(args[0]) is not Tensor:
            return 1.0
        return func(*args, **(kwargs or {}))


@dataclass
class Rehearsal:
    """A step that has been run on fake tensors."""

    tape: Tape
    static: dict[str, int]  # bytes by term
    parameters: dict[
        str, list[tuple[int, int, bool]]
    ]  # (numbers, bytes, trained) of each module's own; a shared one once
    classes: dict[str, str]  # of each module


def on_meta(build: Build, layers: int, cut: Cut = lambda cause: None) -> nn.Module:
    """The model without data."""
    with in_place_of_gaudi(), torch.device("meta"):
        return build(layers, cut)


def rehearse(
    build: Build,
    workload: Workload,
    layers: int,
    scratch: Callable[[Any, tuple, Any], int] | None = None,
    reads_values: bool = True,
    fuse: Fuse | None = None,
    zero3: bool = False,
) -> Rehearsal:
    """Run `workload` on `layers` layers of a model without data. reads_values: the loss looks which tokens have a target,
    as it does on devices that run op by op; False: lazily, it takes them all."""
    tape: list[Tape] = []

    def cut(cause: str) -> None:
        if tape:
            tape[0].cut(cause)

    model = on_meta(build, layers, cut)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _as_fake(model)
        stage = prepare(model, workload, cut=cut, fuse=fuse)
        tape.append(Tape(model, workload.kept if reads_values else -1, scratch))
        for module in model.modules():  # tables that a first forward would make
            if hasattr(module, "frequencies"):
                module._frequencies(torch.device("cpu"), None)

        def phase(name: str) -> None:
            tape[0].enter_phase(name)
            if name == "optimizer":
                tape[0].name((p.grad for p in stage.trained if p.grad is not None), "gradients")

        with in_place_of_zero3() if zero3 else nullcontext(), tape[0]:
            stage.step(phase)
        static = {term: _bytes(tensors) for term, tensors in stage.static.items()}
    parameters, seen = {}, set()
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen.update(map(id, own))
        parameters[name] = [(p.numel(), p.nbytes, p.requires_grad) for p in own]
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    return Rehearsal(tape[0], {term: size for term, size in static.items() if size}, parameters, classes)


def _as_fake(model: nn.Module) -> None:
    """Parameters and buffers on the meta device become fake ones of the CPU; shared ones stay shared."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake(tensor)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


__all__ = ["KINDS", "Build", "Cut", "Rehearsal", "Stage", "Workload", "on_meta", "prepare", "rehearse"]
