"""Impossible inputs are named before any maths; the real small model gives the known numbers."""

import pytest
import torch
from transformers import LlamaConfig, StaticCache

from modeling.cache import StaticKeyValues
from modeling.llama import LlamaForCausalLM

TEXTS = [
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Blue.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "Yes, it is.",
]
LOSSES = [1.81065, 4.41669, 4.52169, 2.97848]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 32}, "7 .* 2"),
        ({"hidden_size": 30, "num_attention_heads": 4, "head_dim": 0}, "30 .* 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "'gelu'"),
    ],
)
def test_impossible_shapes(fields, said):
    small = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    with pytest.raises(ValueError, match=said):
        LlamaForCausalLM(LlamaConfig(**{**small, "num_key_value_heads": 2, **fields}))


def test_unknown_rope_type():
    config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4)
    config.rope_scaling = {"rope_type": "spiral", "factor": 2.0}
    with pytest.raises(ValueError, match=r"rope type 'spiral' is not one of: .*llama3.*yarn"):
        LlamaForCausalLM(config)


def test_explicit_head_dim():
    config = LlamaConfig(
        vocab_size=16, hidden_size=1792, intermediate_size=8, num_hidden_layers=1, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert model.model.layers[0].self_attn.q_proj.out_features == 3072
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 16)


IDS = torch.randint(3, 64, (2, 6))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"input_ids": torch.tensor([[1, 64]])}, "token id 64 is outside the vocabulary of 64"),
        ({"input_ids": torch.tensor([[-1, 3]])}, "token id -1"),
        ({"input_ids": IDS[0]}, "not \\(B, S\\)"),
        ({}, "either input_ids or inputs_embeds"),
        ({"inputs_embeds": torch.zeros(1, 2, 5)}, "not \\(B, S, 32\\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, "attention_mask is 5 long, inputs with their cache 6"),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 6)}, "another batch"),
        ({"input_ids": IDS, "attention_mask": torch.ones(6)}, "neither"),
        ({"input_ids": IDS, "labels": IDS[:, :5]}, "labels \\(2, 5\\) .* \\(2, 6\\)"),
    ],
)
def test_impossible_inputs(pair, inputs, said):
    _, ours = pair()
    with pytest.raises(ValueError, match=said):
        ours(**inputs)


@pytest.mark.parametrize("kind", ["own", "stock"])
def test_a_cache_that_is_too_short(pair, kind):
    _, ours = pair()
    if kind == "own":
        cache = StaticKeyValues(ours.config, 2, 5)
    else:
        cache = StaticCache(config=ours.config, max_batch_size=2, max_cache_len=5, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="the cache holds 5 tokens, 6 are needed"):
        ours(IDS, past_key_values=cache, cache_position=torch.arange(6))


def test_gaudi_trainers_flags_are_taken(pair):
    stock, ours = pair()
    flags = {"attn_softmax_bf16": True, "use_flash_attention": True, "flash_attention_recompute": True}
    torch.testing.assert_close(ours(IDS, **flags, flash_attention_causal_mask=True).logits, stock(IDS).logits)


# SmolLM2-135M-Instruct, real text


def encode(tokenizer, text):
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


@pytest.mark.slow
def test_known_losses_of_four_texts(smol):
    stock, ours, tokenizer = smol
    nats = targets = 0
    for text, expected in zip(TEXTS, LOSSES, strict=True):
        ids = encode(tokenizer, text)
        with torch.no_grad():
            out = ours(ids, labels=ids)
            torch.testing.assert_close(out.logits, stock(ids).logits, rtol=1e-4, atol=1e-3)
        assert out.loss.item() == pytest.approx(expected, abs=1e-4)
        nats, targets = nats + out.nats.item(), targets + out.targets.item()
    assert targets == 33 and nats / targets == pytest.approx(2.85270, abs=1e-4)
    assert ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()


@pytest.mark.slow
def test_left_padded_batch_equals_each_alone_and_packing_equals_both(smol):
    _, ours, tokenizer = smol
    tokenizer.pad_token, tokenizer.padding_side = "<|endoftext|>", "left"
    batch = tokenizer(TEXTS, add_special_tokens=False, padding=True, return_tensors="pt")
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        together = ours(**batch, position_ids=positions).logits
        for row, text in enumerate(TEXTS):
            alone = ours(encode(tokenizer, text)).logits[0]
            assert (together[row, -len(alone) :] - alone).abs().max() < 1e-3
        first, third = encode(tokenizer, TEXTS[0]), encode(tokenizer, TEXTS[2])
        packed = torch.cat((first, third), dim=1)
        labels = packed.clone()
        labels[0, first.shape[1]] = -100
        places = torch.cat((torch.arange(first.shape[1]), torch.arange(third.shape[1])))[None]
        loss = ours(packed, position_ids=places, labels=labels).loss
    assert loss.item() == pytest.approx(2.77888, abs=1e-4)


@pytest.mark.slow
def test_bfloat16_packed_loss_and_gradient(smol):
    import copy

    _, ours, tokenizer = smol
    model = copy.deepcopy(ours).to(torch.bfloat16)
    ids = encode(tokenizer, TEXTS[0])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss.dtype is torch.float32 and loss.item() == pytest.approx(1.8106, abs=0.03)
    packed = torch.cat((ids, encode(tokenizer, TEXTS[2])), dim=1)
    labels = packed.clone()
    labels[0, ids.shape[1]] = -100
    places = torch.cat((torch.arange(ids.shape[1]), torch.arange(packed.shape[1] - ids.shape[1])))[None]
    model.train()
    loss = model(packed, position_ids=places, attention_mask=torch.ones_like(packed), labels=labels).loss
    loss.backward()
    norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    assert loss.item() == pytest.approx(2.77888, abs=0.03) and norm.isfinite() and norm > 0


@pytest.mark.slow
def test_known_continuations_and_hidden_states(smol):
    _, ours, tokenizer = smol
    tokenizer.pad_token, tokenizer.padding_side = "<|endoftext|>", "left"
    prompts = ["Once upon a time", "The sky is"]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    together = ours.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    known = [", the city of Nova Haven was a", " a canvas of colors, a canvas of"]
    assert tokenizer.batch_decode(together) == known
    for row, prompt in enumerate(prompts):
        ids = encode(tokenizer, prompt)
        for kwargs in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
            alone = ours.generate(ids, attention_mask=torch.ones_like(ids), **options, **kwargs)
            assert torch.equal(alone[0, ids.shape[1] :], together[row])
    with torch.no_grad():
        out = ours(encode(tokenizer, TEXTS[1]), output_hidden_states=True)
    assert len(out.hidden_states) == 31
    assert torch.equal(ours.lm_head(out.hidden_states[-1]), out.logits)
