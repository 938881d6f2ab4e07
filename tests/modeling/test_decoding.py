"""The joined forward and the reused cache: same numbers, no more memory, refused where it would not fit."""

import pytest
import torch
from transformers import LlamaConfig

from modeling.cache import ReusedKeyValues
from modeling.decoding import FusedDecoder, LowRank, Product, can_fuse, plain
from modeling.execution import Execution, bind

IDS = torch.randint(3, 64, (3, 14), generator=torch.Generator().manual_seed(2))


def places(padding, start, count):
    return (torch.arange(start, start + count) - padding.unsqueeze(1)).clamp(min=0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """Products are shared out over threads: their outputs divide by 2, not by 3."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("padding", [[0, 0, 0], [0, 5, 2]])
@pytest.mark.parametrize("chunk", [9, 4])
@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True, "head_dim": 16}])
def test_scores_are_transformers_own(pair, padding, chunk, shape):
    stock, ours = pair(**shape)
    padding = torch.tensor(padding)
    decoder, cache = FusedDecoder(ours, 20), ReusedKeyValues(ours.config, 4, 20)
    mask = torch.arange(20) >= padding.unsqueeze(1)
    given = mask if padding.any() else None
    with torch.no_grad():
        for _ in range(2):  # the second batch finds the first one's numbers in the cache
            cache.begin(3)
            spans = [(n, min(n + chunk, 9)) for n in range(0, 9, chunk)] + [(n, n + 1) for n in range(9, 14)]
            for start, end in spans:
                seen = None if given is None else given[:, :end]
                found = decoder(IDS[:, start:end], seen, places(padding, start, end - start), cache)
                wanted = stock(
                    IDS[:, :end], attention_mask=mask[:, :end].long(), position_ids=places(padding, 0, end)
                ).logits[:, -1]
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("threads")
def test_the_model_itself_is_unchanged_and_no_weight_is_kept_twice(pair):
    stock, ours = pair(tie_word_embeddings=False)
    decoder = FusedDecoder(ours, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, stock(IDS).logits, rtol=1e-4, atol=1e-4)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, stock.state_dict()[name]), name
    joined = [p for layer in decoder.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    owned = {parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}
    assert {product.weight.untyped_storage().data_ptr() for product in joined} <= owned


def test_products_are_shared_out_where_threads_divide_the_outputs(pair, threads):
    decoder = FusedDecoder(pair()[1], 20)
    counts = {
        1 if product.parts is None else len(product.parts) for product in decoder.layers[0] if type(product) is Product
    }
    assert counts == {2 if threads == 2 else 1}


@pytest.mark.usefixtures("threads")
def test_adapters_are_added_in_full_precision(pair):
    _, ours = pair()
    targets = {}
    generator = torch.Generator().manual_seed(7)
    for name, module in ours.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            out, size = module.weight.shape
            low = LowRank(
                torch.randn(4, size, generator=generator), torch.randn(out, 4, generator=generator) * 0.1, 0.5
            )
            targets[module] = low

    def adapted(module):
        return (module, targets[module]) if module in targets else plain(module)

    import copy

    merged = copy.deepcopy(ours)
    names = dict(ours.named_modules())
    with torch.no_grad():
        for name, module in merged.named_modules():
            if (low := targets.get(names.get(name))) is not None:
                module.weight += low.up @ low.down * low.scale
        decoder, cache = FusedDecoder(ours, 20, adapted), ReusedKeyValues(ours.config, 3, 20)
        found = decoder(IDS, None, places(torch.zeros(3, dtype=torch.long), 0, 14), cache)
        torch.testing.assert_close(found, merged(IDS).logits[:, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("why", ["hook", "bias", "in place off", "mark_step", "eager attention", "rope"])
def test_refused_where_a_mode_or_a_watcher_would_be_passed_over(pair, why):
    shape = {"bias": {"attention_bias": True}, "rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}
    _, ours = pair(**shape.get(why, {}))
    if why == "hook":
        ours.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    modes = {
        "in place off": {"in_place_residual": False},
        "mark_step": {"mark_step": lambda: None},
        "eager attention": {"attention": "eager"},
    }
    if why in modes:
        bind(ours, Execution(**modes[why]))
    assert not can_fuse(ours)
    with pytest.raises(ValueError, match="cannot be joined"):
        FusedDecoder(ours, 8)


def test_bytes_of_smollm2s_cache():
    config = LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    assert ReusedKeyValues(config, 1, 128).nbytes() == 2 * 30 * 3 * 64 * 128 * 4 == 5_898_240


@pytest.mark.parametrize("whole", [False, True])
def test_rows_left_behind_leave_the_others_keys(pair, whole):
    _, ours = pair()
    cache = ReusedKeyValues(ours.config, 5, 8, whole=whole)
    cache.begin(3)
    keys = torch.randn(3, 2, 4, 8)
    cache.update(keys, keys + 1, 0, {"cache_position": torch.arange(4)})
    cache.advance(4)
    cache.position.add_(4)
    cache.keep(torch.tensor([2, 0]))
    new = torch.randn(2, 2, 1, 8)
    seen, values = cache.update(new, new + 1, 0, {"cache_position": torch.tensor([4])})
    wanted = torch.cat((keys[[2, 0]], new), dim=2)
    assert torch.equal(seen[:, :, :5], wanted) and torch.equal(values[:, :, :5], wanted + 1)
    assert seen.shape[2] == (8 if whole else 5)
