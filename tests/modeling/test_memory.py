"""First-principles counts against transformers' own modules and against hand-worked numbers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from modeling.memory import TrainingShape, lora_parameters, model_parameters, training_terms

GIB = 1024**3
LLAMA2_70B = LlamaConfig(
    vocab_size=32000,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_dim", [None, 24])
def test_parameters_equal_the_real_modules(tied, bias, head_dim):
    extra = {"head_dim": head_dim} if head_dim else {}
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, **extra,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert model_parameters(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj", "down_proj"], ["all-linear"]])
def test_lora_parameters_equal_pefts(targets):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    chosen = "all-linear" if targets == ["all-linear"] else targets
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=5, target_modules=chosen, task_type="CAUSAL_LM"))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_parameters(config, 5, targets) == trainable


def test_llama2_70b_by_hand():
    assert model_parameters(LLAMA2_70B) == 68_976_648_192
    # per layer: rank 4 x (q 8192+8192, k and v 8192+1024, o 8192+8192), 80 layers
    assert (
        lora_parameters(LLAMA2_70B, 4, ["q_proj", "v_proj", "k_proj", "o_proj"])
        == 80 * 4 * (2 * 16384 + 2 * 9216)
        == 16_384_000
    )


def test_states_of_the_measured_run():
    shape = TrainingShape(
        rows=10, length=2048, weight_bytes=2, adapter_bytes=2, adapter_parameters=16_384_000, ranks=8, zero_stage=3,
        checkpointing=True, loss_chunk=1024,
    )  # fmt: skip
    terms = training_terms(LLAMA2_70B, shape)
    states = sum(terms[name] for name in ("weights", "adapter", "adapter gradients", "optimizer states"))
    assert round(states / GIB, 1) == 16.1
    assert terms["checkpoints between layers"] == 80 * 10 * 2048 * 8192 * 2 == 25 * GIB


def test_only_stage_3_cuts_the_weights_and_checkpointing_keeps_one_layer():
    def terms(**changes):
        base = {"rows": 2, "length": 128, "weight_bytes": 2, "adapter_bytes": 4, "adapter_parameters": 1000, "ranks": 4}
        base |= {"zero_stage": None, "checkpointing": False, "loss_chunk": 64} | changes
        return training_terms(LLAMA2_70B, TrainingShape(**base))

    whole = terms()
    assert terms(zero_stage=2)["weights"] == whole["weights"] == 4 * terms(zero_stage=3)["weights"]
    assert terms(zero_stage=2)["optimizer states"] * 4 == whole["optimizer states"]
    assert terms(checkpointing=True)["activations in layers"] * 80 == whole["activations in layers"]
