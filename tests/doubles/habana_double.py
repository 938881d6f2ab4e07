"""What the double has that the real bridge has not: where device "hpu" lies here, and a journal of what was asked of it.

The double ends here. On a machine without the card a tensor cannot be on device "hpu", so `Placement` sends everything that
is meant for it to the CPU, or to torch's lazy engine (HABANA_DOUBLE_DEVICE=cpu, lazy, or none: nothing is sent). What follows:
`tensor.device` says cpu or lazy; torch.autocast("hpu") changes nothing; there are no card memory figures (those of the process
stand in), no graph compiler, no PT_HPU_MAX_COMPOUND_OP_SIZE; "hccl" is gloo. What is proved under it is order, arguments,
arithmetic and the number of graph breaks.
"""

import atexit
import json
import os
import sys
from collections import Counter, defaultdict, deque

import torch
from torch.overrides import TorchFunctionMode

CARDS = int(os.environ.get("HABANA_DOUBLE_CARDS", "8"))
DEVICE = os.environ.get("HABANA_DOUBLE_DEVICE", "cpu")
WATCHED = ("torch", "transformers", "accelerate", "deepspeed", "optimum.habana")

events: list[dict] = []  # imports and settings, in order
calls: Counter = Counter()  # by name of the function
arguments: dict[str, deque] = defaultdict(lambda: deque(maxlen=64))  # of the last calls, tensors as meta tensors


def note(event: str, **details: object) -> None:
    events.append({"event": event, **details})


def count(name: str, **given: object) -> None:
    """A call of `name`. Not heard while torch.compile traces: a compiler would take the counter for a constant."""
    if torch.compiler.is_compiling():
        return
    calls[name] += 1
    if given:
        arguments[name].append({key: _light(value) for key, value in given.items()})


def _light(value: object) -> object:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


class Placement(TorchFunctionMode):
    """Arguments that name device "hpu" name `DEVICE` instead; a torch.device("hpu") itself can be made."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:  # hooks and checkpoints run inside it, and this mode is off in here
            with self:
                return _backward(*args, **kwargs)
        if func is not torch.device and any(_names_hpu(value) for value in (*args, *kwargs.values())):
            args = tuple(DEVICE if _names_hpu(value) else value for value in args)
            kwargs = {name: DEVICE if _names_hpu(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _names_hpu(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "hpu"
    return isinstance(value, str) and value.split(":")[0] == "hpu"


def start() -> None:
    """Once, when the bridge is imported."""
    seen = [name for name in WATCHED if name in sys.modules]
    variables = {name: value for name, value in os.environ.items() if name.startswith(("PT_HPU", "DS_", "DEEPSPEED_"))}
    ranks = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    note("import habana_frameworks.torch", modules=seen, environment=variables, ranks=ranks)
    if DEVICE == "lazy":
        from torch._lazy import ts_backend

        if not hasattr(torch, "lazy"):
            ts_backend.init()
    if DEVICE != "none":
        torch.autograd.has_torch_function = lambda tensors: False  # backward is no function to send elsewhere
        torch.Tensor.record_stream = lambda tensor, stream: None  # streams are the card's
        Placement().__enter__()
    if path := os.environ.get("HABANA_DOUBLE_JOURNAL"):
        atexit.register(_write, f"{path}.{os.environ.get('RANK', '0')}")


def _write(path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"events": events, "calls": calls}, file, indent=1)
