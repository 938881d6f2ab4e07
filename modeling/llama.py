"""Llama (Touvron et al., 2023; Llama 3, 2024) for LoRA training and inference, with Hugging Face's configuration and weight names.

B batch, S sequence, T keys, H hidden, I intermediate, N heads, K key/value heads, D head dim, V vocabulary.

The maths is here; how it is executed is not. Graph breaks, the in-place residual add and kernels belong to the `execution`
that the model and its layers share (modeling/execution.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel

from modeling.execution import Execution
from modeling.masks import check_config, check_inputs, check_labels, check_mask, keys_of, visible_keys
from modeling.ops import chunked_cross_entropy, linear_cross_entropy, shifted_targets, swiglu


@dataclass
class LlamaOutput(CausalLMOutputWithPast):
    """With labels: `loss` is nats / targets (or / num_items_in_batch). In training `logits` is None then."""

    nats: Tensor | None = None  # 0-d float32, sum over the targets
    targets: Tensor | None = None  # 0-d int64
    correct: Tensor | None = None  # 0-d int64, targets that were the most likely token; without gradients only


class LlamaRMSNorm(nn.Module):
    def __init__(self, config: LlamaConfig, execution: Execution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps
        self.execution = execution

    def forward(self, x: Tensor) -> Tensor:
        return self.execution.rms_norm(x, self.weight, self.eps)


class LlamaRotaryEmbedding(nn.Module):
    """Tables of cosine and sine, float32 whatever the module is cast to: the frequencies are no buffer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        scaling = config.rope_scaling or {}
        self.kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if self.kind not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope type {self.kind!r} is not one of: {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
        self.config = config
        self.trained_length = config.max_position_embeddings
        self.frequencies: dict[Any, tuple[Tensor, float]] = {}
        self._frequencies(torch.device("cpu"), None)  # there before a compiler looks

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (B or 1, S) -> cos, sin, each (B or 1, S, D)."""
        length = None
        if self.kind in ("dynamic", "longrope"):  # these depend on the longest position: data, and a synchronisation
            longest = int(positions.max()) + 1
            length = longest if longest > self.trained_length else None
        frequencies, scale = self._frequencies(positions.device, length)
        angles = positions.unsqueeze(-1).float() * frequencies  # (B, S, D/2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * scale, angles.sin() * scale

    def _frequencies(self, device: torch.device, length: int | None) -> tuple[Tensor, float]:
        if (device, length) not in self.frequencies:
            with torch.device("cpu"):  # also while the model is built on the meta device
                values, scale = ROPE_INIT_FUNCTIONS[self.kind](self.config, "cpu", seq_len=length)
            self.frequencies[device, length] = values.float().to(device), scale
        return self.frequencies[device, length]


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int, execution: Execution) -> None:
        super().__init__()
        self.layer, self.execution = layer, execution
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dropout = config.attention_dropout
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, mask: Tensor | None, rope: tuple[Tensor, ...], cache: Any) -> Tensor:
        """x (B, S, H) -> (B, S, H)."""
        # (B, N or K, S, D); -1 because a rank has fewer heads under tensor parallelism
        parts = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.transpose(1, 2) for part in parts)
        cos, sin, positions, slots = rope
        q, k = self.execution.rotate(q, cos, sin, positions), self.execution.rotate(k, cos, sin, positions)
        if cache is not None:
            k, v = cache.update(k, v, self.layer, {"cache_position": slots})  # (B, K, T, D)
        dropout = self.dropout if self.training else 0.0
        return self.o_proj(self.execution.attend(q, k, v, mask, dropout).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj, self.up_proj, x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int, execution: Execution) -> None:
        super().__init__()
        self.execution = execution
        self.self_attn = LlamaAttention(config, layer, execution)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config, execution)
        self.post_attention_layernorm = LlamaRMSNorm(config, execution)

    def forward(self, x: Tensor, mask: Tensor | None, rope: tuple[Tensor, ...], cache: Any = None) -> tuple[Tensor]:
        """x (B, S, H) -> a tuple of one (B, S, H): DeepSpeed's checkpoint returns tuples too."""
        x = self.execution.add_residual(self.self_attn(self.input_layernorm(x), mask, rope, cache), x)
        return (self.execution.add_residual(self.mlp(self.post_attention_layernorm(x)), x),)


class LlamaPreTrainedModel(PreTrainedModel):
    config_class = LlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True


class LlamaModel(LlamaPreTrainedModel):
    def __init__(self, config: LlamaConfig) -> None:
        check_config(config)
        super().__init__(config)
        self.execution = execution = Execution()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, n, execution) for n in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config, execution)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache_position: Tensor | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """Ids (B, S) or embeddings (B, S, H) -> normed hidden states (B, S, H). Raises ValueError for impossible inputs."""
        check_inputs(self.config, input_ids, inputs_embeds)
        rows, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        device = (input_ids if inputs_embeds is None else inputs_embeds).device
        given = (
            DynamicCache.from_legacy_cache(past_key_values) if isinstance(past_key_values, tuple) else past_key_values
        )
        cache = self._cache(given, use_cache)
        seen = cache.get_seq_length() if cache is not None else 0
        slots = torch.arange(length, device=device) + seen if cache_position is None else cache_position
        keys = length if cache is None else keys_of(cache, slots, seen)
        check_mask(attention_mask, rows, length, keys, seen)
        mask = visible_keys(attention_mask, position_ids if given is None else None, slots, keys, seen)
        positions = slots.unsqueeze(0) if position_ids is None else position_ids
        rope = (*self.rotary_emb(positions), positions, slots)

        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        show = self.config.output_attentions if output_attentions is None else output_attentions
        kept, shown = [], []
        source = self.embed_tokens if inputs_embeds is None else None
        # In a list that is emptied: no name here holds a layer's input while the layer runs
        stream = [self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds]
        del input_ids, inputs_embeds
        execution = self.execution
        execution.mark_step()
        with (
            execution.residual_stream(self.layers, source, observed=keep),
            execution.recording(shown if show else None),
        ):
            for index, layer in enumerate(self.layers):
                if keep:
                    kept.append(stream[0])
                stream.append(self._run(layer, stream.pop(), mask, rope, cache)[0])
                execution.mark_layer(index)
        if hasattr(cache, "advance"):
            cache.advance(length)
        hidden = self.norm(stream.pop())
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*kept, hidden) if keep else None,
            attentions=tuple(shown) if show else None,
        )

    def _cache(self, given: Any, use_cache: bool | None) -> Any:
        if self.gradient_checkpointing and self.training:
            return None  # a layer that runs twice would write twice
        wanted = self.config.use_cache if use_cache is None else use_cache
        return DynamicCache() if given is None and wanted else given

    def _run(
        self, layer: nn.Module, x: Tensor, mask: Tensor | None, rope: tuple[Tensor, ...], cache: Any
    ) -> tuple[Tensor]:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(layer.__call__, x, mask, rope)
        return layer(x, mask, rope, cache)


class LlamaHead(nn.Linear):
    """The language-model head. With targets it returns sums of the loss instead of logits: under ZeRO-3 the weight is gathered
    around this module's forward, once, so the loss's chunks must live inside."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, chunk: int = 0) -> Tensor | tuple[Tensor, ...]:
        """hidden (..., H) -> logits (..., V); or hidden (T, H) and targets (T,) -> nats, targets, correct."""
        if targets is None:
            return super().forward(hidden)
        return tuple(linear_cross_entropy(hidden, self.weight, targets, chunk))


class LlamaForCausalLM(LlamaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = LlamaHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_decoder(self) -> LlamaModel:
        return self.model

    def set_decoder(self, decoder: LlamaModel) -> None:
        self.model = decoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> LlamaOutput:
        """Logits (B, S, V) of all positions, of the last `logits_to_keep`, or of the positions it lists (none: no logits).

        labels (B, S), -100 where nothing is to be predicted, are shifted here; the loss covers all of them whatever
        `logits_to_keep`. Other keywords (what a trainer or generate pushes in) are taken and not needed.
        """
        if labels is not None:
            check_labels(labels, *(input_ids if inputs_embeds is None else inputs_embeds).shape[:2])
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
            cache_position,
        )
        hidden = outputs.last_hidden_state
        logits = loss = nats = targets = correct = None
        none_wanted = isinstance(logits_to_keep, Tensor) and not logits_to_keep.numel()
        if (labels is None or not self.training) and not none_wanted:
            last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
            logits = self.lm_head(hidden[:, last if isinstance(logits_to_keep, int) else logits_to_keep])
        if labels is not None:
            nats, targets, correct = self._sums(hidden, labels.to(hidden.device))
            loss = nats / (targets if num_items_in_batch is None else num_items_in_batch)
        # All at once: what is set later is an attribute, but no item that HPU graphs or data parallelism would see
        return LlamaOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            nats=nats,
            targets=targets,
            correct=correct,
        )

    def _sums(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        targets, rows = shifted_targets(labels).flatten(), hidden.flatten(0, 1)
        if isinstance(self.lm_head, LlamaHead):
            return self.lm_head(rows, targets, self.model.execution.loss_chunk)
        return chunked_cross_entropy(self.lm_head, rows, targets, self.model.execution.loss_chunk)
