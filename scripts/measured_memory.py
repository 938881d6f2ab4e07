"""Plans of the code whose memory was measured on cards (conf/measured_memory.yaml), held against the measured figures.

Published were figures of another Llama: optimum-habana's at its pull request 833, which is transformers' with the vendor's kernels.
So what is traced is transformers' own Llama with what that code does otherwise: an additive mask (B, 1, S, T) in the model's
type, attention weights in bf16, (after) the residual added in place and a graph break before the layers, and in training logits
of all positions in float32 with their shifted copy. Nothing here is fitted; `ASSUMED` is what the publication leaves open.
B rows, S tokens, T keys, H hidden, V vocabulary.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.memory import Plan, Setting, plan
from modeling.rehearsal import Build, Cut, Workload

FIGURES = Path(__file__).resolve().parents[1] / "conf" / "measured_memory.yaml"
GIB = 1024**3
LAYERS, VOCABULARY, HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_DIM = 80, 32000, 8192, 28672, 64, 8, 128
ASSUMED = (
    "KV length 2,048; embedding and head whole on every card; RMSNorm op by op in float32 (one fused kernel: the last two rows);"
    " softmax in bf16; additive mask (B, 1, S, T) in bf16; FusedSDPA keeps its weights (B, N, S, T) for backward and takes two more"
    " such matrices in it; graphs cut at gathers and every 10 ops in training, whole in inference"
)


@dataclass(frozen=True)
class Published:
    """A version of the published code."""

    after: bool
    flash: bool = True
    fused_norm: bool = False
    training: bool = False


@dataclass(frozen=True)
class Row:
    name: str
    measured: float  # GiB, or tensors
    predicted: float
    allowed: float | None  # what was set before comparing: share of the measured figure, or absolute where `absolute`
    absolute: bool = False
    band: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        return self.predicted - self.measured

    @property
    def reproduced(self) -> bool | None:
        """None where nothing was set."""
        if self.allowed is None:
            return None
        return abs(self.error) <= self.allowed * (1 if self.absolute else abs(self.measured))


def _attention(flash: bool) -> Any:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    def fused(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **unused: Any
    ) -> tuple[Tensor, None]:
        out = FusedSDPA.apply(q, k, v, mask, 0.0, False, None, "None", False, None, "None")
        return out.transpose(1, 2).contiguous(), None

    def plain(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **unused: Any
    ) -> tuple[Tensor, None]:
        scores = torch.matmul(q, k.transpose(-2, -1)) * HEAD_DIM**-0.5  # one key head a card: nothing is repeated
        scores = scores + mask
        scores = torch.softmax(scores, dim=-1, dtype=q.dtype)
        return torch.matmul(scores, v).transpose(1, 2).contiguous(), None

    return fused if flash else plain


def _in_place(self: nn.Module, hidden_states: Tensor, **options: Any) -> Tensor:
    residual = hidden_states
    hidden_states = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)[0]
    residual.add_(hidden_states)
    hidden_states = residual
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    residual.add_(hidden_states)
    return residual


class Whole(nn.Module):
    """The model with its mask, and in training its loss."""

    def __init__(self, model: nn.Module, config: LlamaConfig) -> None:
        super().__init__()
        self.inner, self.config = model, config

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        rows, length = input_ids.shape
        unused = [options.pop(name, None) for name in ("num_items_in_batch", "attention_mask")]
        del unused
        mask = torch.zeros(rows, 1, length, length, dtype=torch.bfloat16)
        logits = self.inner(input_ids=input_ids, attention_mask=mask, **options).logits
        if labels is None:
            return logits
        logits = logits.float()
        scores = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
        wanted = labels[..., 1:].contiguous().view(-1)
        return types.SimpleNamespace(loss=F.cross_entropy(scores, wanted), logits=logits)


def builder(code: Published) -> Build:
    """transformers' Llama-2-70B as one card of the measured runs had it."""
    shared = 1 if code.training else 8

    def build(layers: int, cut: Cut) -> nn.Module:
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER // shared, num_hidden_layers=layers,
            num_attention_heads=HEADS // shared, num_key_value_heads=KEY_HEADS // shared, head_dim=HEAD_DIM,
            max_position_embeddings=4096, use_cache=not code.training, attn_implementation="eager",
        )  # fmt: skip
        model = StockLlama(config).to(torch.bfloat16)
        ALL_ATTENTION_FUNCTIONS["published"] = _attention(code.flash)
        model.config._attn_implementation = "published"
        if code.fused_norm:
            for module in model.modules():
                if type(module).__name__ == "LlamaRMSNorm":
                    module.forward = lambda x, own=module: FusedRMSNorm.apply(x, own.weight, own.variance_epsilon)
        if code.after:
            model.model.embed_tokens.register_forward_hook(lambda *_: cut("mark_step"))
            for layer in [] if code.training else model.model.layers:
                layer.forward = types.MethodType(_in_place, layer)
        if code.training:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
            adapter = LoraConfig(r=4, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
            model = get_peft_model(model, adapter).to(torch.bfloat16)
        return Whole(model, config)

    return build


def planned(code: Published, figures: dict[str, Any]) -> Plan:
    """The plan of one measured run."""
    if code.training:
        workload = Workload("training", figures["training"]["rows"], figures["training"]["length"], optimizer=False)
        setting = Setting("hpu", lazy=True, ranks=8, zero_stage=3, compound=10, pipelined=True)
    else:
        rows, length = figures["inference"]["rows"], figures["inference"]["length"]
        workload = Workload("prompt", rows, length, keys=length, whole=False)
        setting = Setting("hpu", lazy=True, lazy_collectives=True, shared=8)
    return plan(builder(code), workload, setting, LAYERS)


def figures() -> dict[str, Any]:
    """The measured figures, GiB."""
    return yaml.safe_load(FIGURES.read_text(encoding="utf-8"))


def rows() -> list[Row]:
    """Every measured figure and every measured difference, with its prediction."""
    known = figures()
    tensor = known["inference"]["rows"] * known["inference"]["length"] * HIDDEN * 2 / GIB
    found: list[Row] = []
    for flash, name, allowed in ((True, "flash attention", 0.03), (False, "no flash attention", 0.08)):
        measured = known["inference"]["with_flash_attention" if flash else "without_flash_attention"]
        plans = [planned(Published(after, flash), known) for after in (False, True)]
        for state, made in zip(("before", "after"), plans, strict=True):
            found.append(_figure(f"inference, {name}, {state}", measured[state], made, allowed))
        drop, seen = (plans[0].nominal - plans[1].nominal) / GIB, measured["before"] - measured["after"]
        found.append(Row(f"inference, {name}: before less after", seen, drop, 0.5, absolute=True))
        if flash:
            found.append(Row("in-place add: (batch, seq, hidden) tensors", 2.0, drop / tensor, 0.005, absolute=True))
    trained = [planned(Published(after, training=True), known) for after in (False, True)]
    for state, made in zip(("before", "after"), trained, strict=True):
        found.append(_figure(f"training, peak, {state}", known["training"]["peak"][state], made, 0.20))
        found.append(Row(f"training, at the end, {state}", known["training"]["end"][state], made.end / GIB, 0.03))
    peak = known["training"]["peak"]
    change = (trained[1].nominal - trained[0].nominal) / GIB
    found.append(Row("training, peak: after less before", peak["after"] - peak["before"], change, 0.1, absolute=True))
    for after, state in ((False, "before"), (True, "after")):
        made = planned(Published(after, fused_norm=True), known)
        measured = known["inference"]["with_flash_attention"][state]
        found.append(_figure(f"inference, flash attention, {state}, were RMSNorm fused", measured, made, None))
    return found


def _figure(name: str, measured: float, made: Plan, allowed: float | None) -> Row:
    return Row(name, measured, made.nominal / GIB, allowed, band=(made.low / GIB, made.high / GIB))


def table(found: list[Row]) -> str:
    """As Markdown."""
    lines = ["| | measured | predicted | error | low to high | |", "|---|---|---|---|---|---|"]
    for row in found:
        share = "" if row.absolute else f" ({100 * row.error / row.measured:+.1f} %)"
        band, verdict = "", ""
        if row.band:
            inside = row.band[0] <= row.measured <= row.band[1]
            band = f"{row.band[0]:.1f} to {row.band[1]:.1f}{'' if inside else ', measured outside'}"
        if row.reproduced is not None:
            verdict = "within" if row.reproduced else "not reproduced"
            verdict += f" ±{row.allowed:g}" if row.absolute else f" ±{100 * row.allowed:g} %"
        lines.append(
            f"| {row.name} | {row.measured:.2f} | {row.predicted:.2f} | {row.error:+.2f}{share} | {band} | {verdict} |"
        )
    return "\n".join(
        [*lines, "", f"GiB a card, except the row of tensors. Assumed: {ASSUMED}. Source: {figures()['source']}."]
    )
