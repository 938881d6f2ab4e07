"""Tiny random models of both implementations with the same weights."""

import pytest
import torch
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama

from modeling.llama import LlamaForCausalLM

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def pair():
    """pair(dtype=..., **config) -> (stock, ours), equal random weights, eval mode."""

    def build(dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
        torch.manual_seed(seed)
        config = LlamaConfig(**{**TINY, **changes})
        stock = StockLlama(config).to(dtype).eval()
        with torch.no_grad():  # larger than the initializer's weights: differences show
            for name, parameter in stock.named_parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.3)
        ours = LlamaForCausalLM(config).to(dtype).eval()
        ours.load_state_dict(stock.state_dict())
        return stock, ours

    return build
