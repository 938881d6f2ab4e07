"""Our Llama against transformers' own, over a grid of the family's features: logits, loss, gradients, hidden states, ids."""

import itertools

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
GRID = list(itertools.product(ROPES, HEADS, ["none", "left", "right"], [False, True], [False, True], ["eager", "sdpa"]))


def texts(rows: int = 3, length: int = 12, padding: str = "none"):
    """ids, attention mask, labels; rows of different lengths where padded."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        if padding == "left":
            mask[row, : 2 * row] = 0
        elif padding == "right":
            mask[row, length - 2 * row :] = 0
    # No label for padding, nor for a row's first token: what a padding position says of it is no one's business
    return ids, mask, ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)


def close(ours, stock, tolerance=1e-5):
    torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rope", "heads", "padding", "bias", "tied", "attention"), GRID)
def test_logits_loss_hidden_states_and_gradients(pair, rope, heads, padding, bias, tied, attention):
    from modeling.execution import Execution, bind

    queries, keys = HEADS[heads]
    stock, ours = pair(
        rope_scaling=ROPES[rope], num_attention_heads=queries, num_key_value_heads=keys, attention_bias=bias, mlp_bias=bias,
        tie_word_embeddings=tied, head_dim=12 if bias else None, max_position_embeddings=16 if rope == "dynamic" else 128,
    )  # fmt: skip
    stock.set_attn_implementation(attention)
    bind(ours, Execution(attention=attention, loss_chunk=7))
    ids, mask, labels = texts(length=20 if rope == "dynamic" else 12, padding=padding)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "output_hidden_states": True}
    theirs, mine = stock(**inputs), ours(**inputs)
    real = mask.bool()
    close(mine.logits[real], theirs.logits[real])
    close(mine.loss, theirs.loss)
    assert len(mine.hidden_states) == len(theirs.hidden_states) == 3
    for one, other in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        close(one[real], other[real])
    stock.train()
    ours.train()
    stock(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    trained = ours(input_ids=ids, attention_mask=mask, labels=labels)
    assert trained.logits is None
    close(trained.loss, theirs.loss)
    trained.loss.backward()
    for (name, one), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        close(one.grad, other.grad), name


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rope", ROPES)
def test_generated_ids_of_each_cache(pair, rope, heads, padding):
    queries, keys = HEADS[heads]
    stock, ours = pair(rope_scaling=ROPES[rope], num_attention_heads=queries, num_key_value_heads=keys)
    ids, mask, _ = texts(padding=padding)
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = stock.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert torch.equal(ours.generate(ids, use_cache=False, **options), expected)
    assert torch.equal(ours.generate(ids, cache_implementation="static", disable_compile=True, **options), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_bfloat16_stays_as_close_to_float32_as_stock_does(pair, attention, padding):
    from modeling.execution import Execution, bind

    exact, _ = pair()
    stock, ours = pair(dtype=torch.bfloat16)
    stock.set_attn_implementation(attention)
    bind(ours, Execution(attention=attention))
    ids, mask, labels = texts(padding=padding)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    theirs, mine, true = stock(**inputs), ours(**inputs), exact(**inputs)
    real = mask.bool()
    assert mine.loss.dtype is torch.float32
    assert (mine.logits[real] - true.logits[real]).abs().max() <= 1.5 * (
        theirs.logits[real] - true.logits[real]
    ).abs().max()
    assert abs(mine.loss - true.loss) <= 0.02
    stock.train()
    ours.train()
    stock(**inputs).loss.backward()
    ours(**inputs).loss.backward()
    for (name, one), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        scale = other.grad.float().abs().max()
        assert (one.grad.float() - other.grad.float()).abs().max() <= 0.05 * scale, name


def test_llama3_frequencies(pair):
    from modeling.llama import LlamaRotaryEmbedding

    config = pair()[0].config
    config.rope_theta, config.head_dim, config.max_position_embeddings = 5e5, 64, 131072
    plain, _ = LlamaRotaryEmbedding(config)._frequencies(torch.device("cpu"), None)
    scaled = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    found = []
    for key in ("rope_type", "type"):
        config.rope_scaling = {key: "llama3", **scaled}
        found.append(LlamaRotaryEmbedding(config)._frequencies(torch.device("cpu"), None)[0])
    assert torch.equal(*found)
    ratio = plain / found[0]
    torch.testing.assert_close(ratio[:15], torch.ones(15))
    torch.testing.assert_close(ratio[15:18], torch.tensor([1.6513, 3.2923, 9.6667]), rtol=1e-4, atol=0)
    torch.testing.assert_close(ratio[18:], torch.full((14,), 32.0))
    assert found[0][20].item() == pytest.approx(8.570256e-06, rel=1e-6)


def test_tables_stay_float32_in_a_cast_module(pair):
    _, ours = pair(max_position_embeddings=4096)
    positions = torch.arange(4000, 4010).unsqueeze(0)
    before = ours.model.rotary_emb(positions)
    cast = ours.to(torch.bfloat16).model.rotary_emb(positions)
    assert cast[0].dtype is torch.float32
    assert torch.equal(before[0], cast[0]) and torch.equal(before[1], cast[1])


def test_attentions_equal_stocks(pair):
    stock, ours = pair()
    stock.set_attn_implementation("eager")
    ids, mask, _ = texts(padding="right")
    theirs = stock(ids, attention_mask=mask, output_attentions=True).attentions
    mine = ours(ids, attention_mask=mask, output_attentions=True).attentions
    for one, other in zip(mine, theirs, strict=True):
        rows = mask.bool()[:, None, :, None].expand_as(one)
        close(one[rows], other[rows])


def test_embeddings_as_input(pair):
    stock, ours = pair()
    ids, mask, _ = texts()
    table = ours.get_input_embeddings()
    close(ours(inputs_embeds=table(ids)).logits, stock(ids).logits)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(
        ours.generate(inputs_embeds=table(ids), **options), stock.generate(ids, **options)[:, ids.shape[1] :]
    )


@pytest.mark.parametrize("keep", [0, 1, 5, torch.tensor([2, 7])])
def test_logits_to_keep(pair, keep):
    stock, ours = pair()
    ids, _, labels = texts()
    close(ours(ids, logits_to_keep=keep).logits, stock(ids, logits_to_keep=keep).logits)
    close(
        ours(ids, labels=labels, logits_to_keep=keep).loss, stock(ids, labels=labels).loss
    )  # the loss sees all positions


@pytest.mark.parametrize("legacy", [False, True])
def test_prefill_in_chunks_equals_one_shot(pair, legacy):
    stock, ours = pair()
    ids, _, _ = texts(length=15)
    whole = stock(ids).logits
    cache = ours(ids[:, :6], use_cache=True).past_key_values
    if legacy:
        cache = cache.to_legacy_cache()
    second = ours(ids[:, 6:14], past_key_values=cache)
    last = ours(ids[:, 14:], past_key_values=second.past_key_values)
    close(torch.cat((second.logits, last.logits), dim=1), whole[:, 6:])


@pytest.mark.parametrize("kind", ["dynamic", "static", "own"])
def test_left_padded_prefill_and_decoding_with_each_cache(pair, kind):
    from modeling.cache import StaticKeyValues

    stock, ours = pair()
    ids, mask, _ = texts(padding="left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = stock(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = {
        "dynamic": DynamicCache,
        "static": lambda: StaticCache(
            config=ours.config, max_batch_size=3, max_cache_len=20, device="cpu", dtype=torch.float32
        ),
        "own": lambda: StaticKeyValues(ours.config, 3, 20),
    }[kind]()
    found = []
    for part in (slice(0, 7), slice(7, 11), slice(11, 12)):
        places = torch.arange(12)[part]
        out = ours(
            ids[:, part],
            attention_mask=mask[:, : part.stop],
            position_ids=positions[:, part],
            past_key_values=cache,
            cache_position=places,
        )
        found.append(out.logits)
    real = mask.bool()
    close(torch.cat(found, dim=1)[real], expected[real])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex"])
def test_rows_of_a_batch_do_not_see_each_other(pair, attention):
    from modeling.execution import Execution, bind

    _, ours = pair()
    bind(ours, Execution(attention=attention))
    ids, _, _ = texts(rows=3)
    for side in ("left", "right"):
        _, mask, _ = texts(rows=3, padding=side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            batched = ours(ids, attention_mask=mask, position_ids=positions).logits
            assert batched.isfinite().all()
            for row in range(3):
                alone = ours(ids[row : row + 1][:, mask[row].bool()]).logits
                close(batched[row][mask[row].bool()], alone[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex"])
def test_packed_sequences_equal_each_alone(pair, attention):
    from modeling.execution import Execution, bind

    _, ours = pair()
    bind(ours, Execution(attention=attention))
    ids, _, _ = texts(rows=1, length=16)
    positions = torch.tensor([[*range(7), *range(5), *range(4)]])
    with torch.no_grad():
        packed = ours(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
        alone = [ours(ids[:, part]).logits for part in (slice(0, 7), slice(7, 12), slice(12, 16))]
    close(packed, torch.cat(alone, dim=1))


def test_packed_sequences_train_as_stocks_do(pair):
    stock, ours = pair()
    stock.config.use_cache = False
    ids, _, labels = texts(rows=1, length=12)
    positions = torch.tensor([[*range(7), *range(5)]])
    labels[0, 7] = -100
    inputs = {"input_ids": ids, "position_ids": positions, "labels": labels}
    stock.train()(**inputs).loss.backward()
    ours.train()(**inputs).loss.backward()
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        close(one.grad, other.grad)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(100)])
def test_loss_denominator(pair, items):
    stock, ours = pair()
    ids, _, labels = texts(padding="right")
    given = {} if items is None else {"num_items_in_batch": items}
    theirs, mine = stock(ids, labels=labels, **given), ours(ids, labels=labels, **given)
    assert isinstance(mine, CausalLMOutputWithPast)
    close(mine.loss, theirs.loss)
    targets = labels[:, 1:].ne(-100)
    assert mine.targets == targets.sum()
    hits = theirs.logits[:, :-1].argmax(-1).eq(labels[:, 1:]) & targets
    assert mine.correct == hits.sum()
    close(mine.nats, theirs.loss * (targets.sum() if items is None else items))


def test_saved_and_loaded_by_both(pair, tmp_path):
    from transformers import LlamaForCausalLM as StockLlama

    from modeling.llama import LlamaForCausalLM

    for tied in (False, True):
        stock, ours = pair(tie_word_embeddings=tied)
        ids, _, _ = texts()
        ours.save_pretrained(tmp_path / f"{tied}")
        close(StockLlama.from_pretrained(tmp_path / f"{tied}")(ids).logits, stock(ids).logits, 0)
        again = LlamaForCausalLM.from_pretrained(tmp_path / f"{tied}")
        close(again(ids).logits, ours(ids).logits, 0)
        shared = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
        assert shared is tied
