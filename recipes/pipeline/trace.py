"""A trace of the first training steps, for scripts/parity.py: a fingerprint of each module's output, of each trained weight's
gradient, of each trained weight after the step, and of the random numbers' state. Written by rank 0 to trace.jsonl in the run's folder.

A fingerprint is three sums in float64: of the tensor, of its absolute values, and weighted by a fixed wave, so that values
that change places are seen too. In training only: a hook on a layer would close the in-place gate of inference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

TRACE_FILE = "trace.jsonl"
RANDOM = "random state"  # of this phase are two entries: at step 0 before the first evaluation, at step 1 after it
PREFIXES = ("module.", "base_model.model.", "_orig_mod.")


def fingerprint(tensor: torch.Tensor) -> list[float]:
    """[sum, sum of absolute values, sum weighted by a wave] of any tensor."""
    flat = tensor.detach().to("cpu").reshape(-1).double()
    wave = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7 + 0.3)
    return [flat.sum().item(), flat.abs().sum().item(), (flat @ wave).item()]


class Tracer(TrainerCallback):
    """Records the first `steps` optimizer steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.path, self.left = folder / TRACE_FILE, steps
        self.entries: list[dict[str, Any]] = []
        self.handles: list[Any] = []
        self.step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random(args.device.type)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step + 1
        if self.left <= 0:
            return
        if self.step == 1:
            self._note_random(args.device.type)
        for name, module in model.named_modules():
            if name:
                self.handles.append(module.register_forward_hook(self._forward(_plain(name))))
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                self.handles.append(weight.register_hook(self._gradient(_plain(name))))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.left <= 0:
            return
        self.left -= 1
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for name, weight in model.named_parameters():
            if weight.requires_grad and weight.numel():  # ZeRO-3 leaves none here
                self._note("update", _plain(name), weight)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self.entries)
        self.entries.clear()

    def _forward(self, name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, torch.Tensor):
                self._note("forward", name, first)

        return hook

    def _gradient(self, name: str) -> Any:
        return lambda gradient: self._note("gradient", name, gradient)

    def _note_random(self, kind: str) -> None:
        states = {"cpu": torch.get_rng_state()}
        if kind not in ("cpu", "lazy"):
            states[kind] = torch.get_device_module(kind).get_rng_state()
        for name, state in states.items():
            self._note(RANDOM, name, state)

    def _note(self, phase: str, name: str, tensor: torch.Tensor) -> None:
        entry = {"step": self.step, "phase": phase, "name": name, "shape": list(tensor.shape)}
        self.entries.append({**entry, "print": fingerprint(tensor)})


def _plain(name: str) -> str:
    """A module's name without its wrappers' (DeepSpeed, DDP, PEFT, torch.compile), so that two runs' names match."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace(".base_layer", "").replace("_orig_mod.", "")
