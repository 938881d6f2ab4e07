"""Plans of the code whose memory was measured on cards (conf/measured_memory.yaml), held against the measured figures.

Published were figures of another Llama: optimum-habana's at its pull request 833, which is transformers' with the vendor's attention.
So what is traced is transformers' own Llama with what that code does otherwise: an additive mask (B, 1, S, T) in the model's
type, attention weights in bf16, the residual added in place (after), a graph break before the layers (after), logits of all
positions in float32 and their shifted copy in the loss. B rows, S tokens, T keys, H hidden.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.memory import Plan, Setting, plan
from modeling.rehearsal import Build, Cut, Workload

FIGURES = Path(__file__).resolve().parents[1] / "conf" / "measured_memory.yaml"
GIB = 1024**3
LAYERS = 80


@dataclass(frozen=True)
class Code:
    """What differs between the published versions, and what of the device is assumed."""

    after: bool
    flash: bool
    norm: str = "ops"  # ops: RMSNorm op by op, in float32; fused: one kernel that keeps its input


def _config(layers: int, ranks: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672 // ranks, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=64 // ranks, num_key_value_heads=8 // ranks, max_position_embeddings=4096, use_cache=ranks > 1,
    )  # fmt: skip


def _flash(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **unused: Any) -> tuple[Tensor, None]:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    out = FusedSDPA.apply(q, k, v, mask, 0.0, mask is None, None, "None", False, None, "left")
    return out.transpose(1, 2).contiguous(), None


def _plain(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **unused: Any) -> tuple[Tensor, None]:
    # Keys of one head are seen by all: nothing is repeated
    scores = torch.matmul(q, k.transpose(-2, -1)) * module.head_dim**-0.5
    if mask is not None:
        scores = scores + mask
    scores = torch.softmax(scores, dim=-1, dtype=q.dtype)
    return torch.matmul(scores, v).transpose(1, 2).contiguous(), None


def _fused_norm(self: nn.Module, x: Tensor) -> Tensor:
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    return FusedRMSNorm.apply(x, self.weight, self.variance_epsilon)


def _in_place(self: nn.Module, hidden_states: Tensor, **options: Any) -> Tensor:
    residual = hidden_states
    residual.add_(self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)[0])
    hidden_states = self.mlp(self.post_attention_layernorm(residual))
    residual.add_(hidden_states)
    return residual


def builder(code: Code, ranks: int, training: bool) -> Build:
    """transformers' Llama-2-70B as a rank of the measured runs had it."""

    def build(layers: int, cut: Cut) -> nn.Module:
        from habana_frameworks.torch.hpex import kernels, normalization

        ALL_ATTENTION_FUNCTIONS["published"] = _attention_of(code, kernels)
        model = StockLlama(_config(layers, ranks)).to(torch.bfloat16)
        model.config._attn_implementation = "published"
        for module in model.modules():
            if code.norm == "fused" and type(module).__name__ == "LlamaRMSNorm":
                module.forward = types.MethodType(_with_norm(normalization.FusedRMSNorm), module)
        if code.after and not training:
            for layer in model.model.layers:
                layer.forward = types.MethodType(_in_place, layer)
        if code.after:
            model.model.layers[0].register_forward_pre_hook(lambda *_: cut("mark_step"))
        if not training:
            return model
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        adapter = LoraConfig(r=4, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        return get_peft_model(model, adapter).to(torch.bfloat16)

    return build
