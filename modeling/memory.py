"""Memory of a LoRA training from first principles: no hardware, no weights, only the shape of the model.

B rows of a batch, S tokens of a row, H hidden, I intermediate, N query heads, K key/value heads, D head dim, V vocabulary,
L layers, P ranks. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import LlamaConfig

MASTER_AND_MOMENTS = 12  # float32 copy, first and second moment of Adam
MOMENTS = 8  # Adam on float32 parameters needs no copy


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
class TrainingShape:
    """What a run's memory depends on beside the model's own shape."""

    rows: int  # B, micro-batch of a rank
    length: int  # S
    weight_bytes: int  # of one frozen parameter
    adapter_bytes: int  # of one adapter parameter
    adapter_parameters: int
    ranks: int  # P
    zero_stage: int | None  # None: no DeepSpeed
    checkpointing: bool
    loss_chunk: int  # tokens whose logits exist at one time


def training_terms(config: LlamaConfig, shape: TrainingShape) -> dict[str, int]:
    """Bytes a card holds at the peak of a training step, by term. Kernels' scratch and the allocator's waste are not in it."""
    stage = shape.zero_stage or 0
    tokens = shape.rows * shape.length
    weights = model_parameters(config) * shape.weight_bytes
    layer = layer_parameters(config) * shape.weight_bytes
    table = config.vocab_size * config.hidden_size * shape.weight_bytes
    states = MASTER_AND_MOMENTS if shape.zero_stage is not None and shape.adapter_bytes < 4 else MOMENTS
    hidden = tokens * config.hidden_size * shape.weight_bytes
    inside = _layer_activations(config, tokens, shape.weight_bytes)
    layers = config.num_hidden_layers
    return {
        "weights": weights // shape.ranks if stage == 3 else weights,
        "weights gathered for use": max(2 * layer, table) if stage == 3 else 0,
        "adapter": shape.adapter_parameters * shape.adapter_bytes // (shape.ranks if stage == 3 else 1),
        "adapter gradients": shape.adapter_parameters * shape.adapter_bytes // (shape.ranks if stage >= 2 else 1),
        "optimizer states": shape.adapter_parameters * states // (shape.ranks if stage >= 1 else 1),
        "checkpoints between layers": layers * hidden if shape.checkpointing else 0,
        "activations in layers": inside if shape.checkpointing else layers * inside,
        "logits of a loss chunk": 2 * min(shape.loss_chunk, tokens) * config.vocab_size * 4,
    }


def _layer_activations(config: LlamaConfig, tokens: int, size: int) -> int:
    # Kept for backward: both norms' inputs, q, k, v, the attention's result, gate, up, and their product
    shapes = linear_shapes(config)
    width = 2 * config.hidden_size + 2 * shapes["q_proj"][1] + 2 * shapes["k_proj"][1] + 3 * config.intermediate_size
    return tokens * width * size
