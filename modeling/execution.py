"""How the model is executed: graph breaks, the in-place residual add, kernels by name. The only place where modes are decided.

One `Execution` is shared by a LlamaModel and all its layers; `bind` sets it. The layer code has two seams,
`mark_step()` and `add_residual(x, residual)`, and knows nothing else of modes.

Why the gate is what it is. Adding in place lowers the peak in inference, but it must not touch training: under a re-entrant
checkpoint (the kind DeepSpeed and optimum-habana use) the forward runs without gradients *while training*, and a layer that
hands back its own mutated input makes backward go past it: the loss stands still and nothing raises. So the gate wants both:
no layer in training, and gradients off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modeling import attention as attention_kernels
from modeling import ops as op_kernels
from modeling.attention import FusedOptions


class Execution:
    """Modes and kernels of one model.

    mark_step: what cuts and runs the lazy graph; None where nothing is lazy.
    in_place_residual: None: the gate decides; False: never; True: always, which breaks training (for experiments only).
    layers_per_mark_step: in inference one more break after every so many layers; 0: only the one before the layers.
    attention, ops: names of kernels (modeling.attention.NAMES; eager or hpu). Raises ValueError for others.
    loss_chunk: tokens whose logits exist at one time.
    """

    def __init__(
        self,
        mark_step: Callable[[], None] | None = None,
        in_place_residual: bool | None = None,
        layers_per_mark_step: int = 0,
        attention: str = "sdpa",
        ops: str = "eager",
        loss_chunk: int = 1024,
        softmax_bf16: bool = False,
        fused: FusedOptions | None = None,
    ) -> None:
        self._mark_step = mark_step
        self.in_place_residual = in_place_residual
        self.layers_per_mark_step = layers_per_mark_step
        self.loss_chunk = loss_chunk
        self.attention = attention
        self.attend = attention_kernels.by_name(attention, softmax_bf16, fused)
        self.rms_norm, self.rotate = op_kernels.by_name(ops)
        self.plain = mark_step is None and ops == "eager"  # neither graphs nor a device's own kernels
        self._may_overwrite = in_place_residual is True
        self._owns_stream = True

    def mark_step(self) -> None:
        """A graph break; nothing where execution is not lazy."""
        if self._mark_step is not None:
            self._mark_step()

    def mark_layer(self, index: int) -> None:
        """A break behind layer `index` in inference, as `layers_per_mark_step` says."""
        if self.layers_per_mark_step and not torch.is_grad_enabled() and (index + 1) % self.layers_per_mark_step == 0:
            self.mark_step()

    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x, in residual's own memory where nobody can see it."""
        if not self._may_overwrite:
            return residual + x
        if not self._owns_stream:  # the first sum makes a tensor of our own
            self._owns_stream = True
            return residual + x
        return residual.add_(x)

    @contextmanager
    def residual_stream(self, layers: Iterable[nn.Module], source: nn.Module | None, observed: bool) -> Iterator[None]:
        """Around one pass through `layers`: decides whether the stream may be overwritten.

        source: the module that made the stream, None when a caller did. observed: the caller keeps layers' outputs.
        """
        before = self._may_overwrite, self._owns_stream
        if self.in_place_residual is None:
            self._may_overwrite = not observed and _nobody_looks(layers)
            self._owns_stream = source is not None and not _watched(source)
        try:
            yield
        finally:
            self._may_overwrite, self._owns_stream = before

    @contextmanager
    def recording(self, weights: list[Tensor] | None) -> Iterator[None]:
        """Inside, attention is computed plainly and its weights (B, N, S, T) are collected, layer by layer."""
        if weights is None:
            yield
            return

        def attend(*args: Tensor) -> Tensor:
            out, seen = attention_kernels.attention_weights(*args)
            weights.append(seen)
            return out

        usual, self.attend = self.attend, attend
        try:
            yield
        finally:
            self.attend = usual


def _nobody_looks(layers: Iterable[nn.Module]) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler decides about memory itself
        return False
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return False
    # Norms read the stream, layers take and return it; other modules never see it
    seen = (part for layer in layers for part in (layer, layer.input_layernorm, layer.post_attention_layernorm))
    return not any(part.training or _watched(part) for part in seen)


def _watched(module: nn.Module) -> bool:
    """A hook that could keep a tensor of the stream. DeepSpeed's own hooks gather weights and keep nothing."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith("deepspeed") for hook in hooks)


def bind(model: nn.Module, execution: Execution) -> None:
    """Make `execution` the one of every Llama module below `model` (through PEFT's and DeepSpeed's wrappers)."""
    for module in model.modules():
        if isinstance(getattr(module, "execution", None), Execution):
            module.execution = execution


def mark_step_for(device_type: str, lazy: bool) -> Callable[[], None] | None:
    """The graph break of a device in lazy execution: Gaudi's, torch's own lazy engine's; None elsewhere."""
    if not lazy:
        return None
    if device_type == "hpu":
        from habana_frameworks.torch.core import mark_step

        return mark_step
    if device_type == "lazy":
        from torch._lazy import mark_step

        return mark_step
    raise ValueError(f"device {device_type!r} has no lazy execution; there is hpu and lazy")
