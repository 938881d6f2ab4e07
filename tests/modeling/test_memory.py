"""First-principles counts against transformers' own modules and against hand-worked numbers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from modeling.memory import lora_parameters, model_parameters
from recipes.pipeline.compose import compose_here
from recipes.pipeline.memory_plan import main_plan

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
    """16.1 GiB a card of weights, adapter and Adam's states, where DeepSpeed's estimator says 145."""
    plan = main_plan(compose_here(["+experiment=70b"]))
    assert round(sum(plan.static.values()) / GIB, 1) == 16.1
    # A checkpoint a layer of 10 rows, and the rest of what the loss keeps
    assert 0 <= plan.peak["kept for backward"] - 25 * GIB < 0.1 * GIB
    assert 25 * GIB == 80 * 10 * 2048 * 8192 * 2


def test_only_stage_3_cuts_the_weights():
    def terms(stage):
        whole = ["++deepspeed.zero_optimization.stage3_param_persistence_threshold=0"] if stage == 3 else []
        return main_plan(compose_here(["+experiment=tiny", "runtime.cards=4", f"deepspeed=zero{stage}", *whole])).static

    whole, states, cut = terms(0), terms(2), terms(3)
    assert states["weights"] == whole["weights"] == pytest.approx(4 * cut["weights"], rel=0.01)
    trained = whole["adapter"] // 4
    assert whole["optimizer"] == 8 * trained  # Adam's two moments
    assert states["optimizer"] == 12 * trained // 4  # ZeRO-2 adds its own copy, and cuts all three
