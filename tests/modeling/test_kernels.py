"""Every kernel by name gives the reference's result; Gaudi's under doubles that check arguments and compute the truth."""

import sys
from pathlib import Path

import pytest
import torch

from modeling import attention, ops
from modeling.execution import Execution, bind

DOUBLES = str(Path(__file__).resolve().parents[1] / "doubles")


@pytest.fixture
def gaudi(monkeypatch):
    """The doubles' modules of kernels, importable as habana_frameworks for this test only."""
    monkeypatch.syspath_prepend(DOUBLES)
    monkeypatch.setenv("HABANA_DOUBLE_DEVICE", "none")  # plain CPU tensors are handed to the kernels
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    import habana_double
    from habana_frameworks.torch.hpex import kernels, normalization  # noqa: F401

    yield habana_double.arguments
    for name in [name for name in sys.modules if name.startswith("habana_")]:
        del sys.modules[name]
    del torch.hpu


def tensors(queries=6, keys=6, heads=4, key_heads=2, rows=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, heads, queries, 8, generator=generator).to(dtype)
    k, v = (torch.randn(rows, key_heads, keys, 8, generator=generator).to(dtype) for _ in range(2))
    return q, k, v


def plainly(q, k, v, mask):
    """By definition, a query at a time."""
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h * k.shape[1] // q.shape[1]].double(), v[b, h * k.shape[1] // q.shape[1]].double()
            for i in range(q.shape[2]):
                seen = mask[b if mask.shape[0] > 1 else 0, 0, i]
                if seen.any():
                    weights = torch.softmax(keys[seen] @ q[b, h, i].double() / 8**0.5, dim=0)
                    out[b, i, h] = (weights @ values[seen]).float()
    return out


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


@pytest.mark.parametrize("name", attention.NAMES)
@pytest.mark.parametrize("case", ["causal", "decode", "left padding", "packed"])
def test_attention_by_name(name, case, gaudi):
    queries = 1 if case == "decode" else 6
    q, k, v = tensors(queries=queries)
    mask = None
    if case == "left padding":
        mask = causal(6, 6).repeat(2, 1, 1, 1)
        mask[1, :, :, :2] = False  # two queries of the second row see nothing
    elif case == "packed":
        sequence = torch.tensor([0, 0, 0, 1, 1, 1])
        mask = causal(6, 6) & (sequence[:, None] == sequence)
    whole = causal(queries, 6) if mask is None else mask
    found = attention.by_name(name)(q, k, v, mask, 0.0)
    assert found.shape == (2, queries, 4, 8)
    rows = whole.any(-1)[:, 0].expand(2, queries)
    torch.testing.assert_close(found[rows], plainly(q, k, v, whole)[rows], rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()


def test_gaudis_attention_is_called_as_optimum_habana_calls_it(gaudi):
    fused = attention.by_name("fused_sdpa", fused=attention.FusedOptions(recompute=True, fast_softmax=True))
    q, k, v = tensors(dtype=torch.bfloat16)
    fused(q, k, v, None, 0.0)
    fused(q, k, v, causal(6, 6), 0.0)
    fused(q[:, :, :1], k, v, causal(1, 6), 0.0)
    prefill, masked, decode = gaudi["FusedSDPA"]
    names = ("is_causal", "softmax_mode", "recompute_mode", "valid_seq_len", "seq_padding_type")
    assert [prefill[name] for name in names] == [True, "fast", True, None, "left"]
    assert [masked[name] for name in names] == [False, "fast", True, None, "None"]
    assert [decode[name] for name in names] == [False, "None", False, None, "None"]
    assert masked["attn_mask"].dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="needs is_causal"):  # hence the rule in recipes/pipeline/config.py
        fused(q.requires_grad_(), k, v, causal(6, 6), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eager", "hpu"])
def test_norm_and_rotation_by_name(name, dtype, gaudi):
    chosen = ops.by_name(name)
    x, weight = torch.randn(2, 5, 32).to(dtype), torch.randn(32).to(dtype)
    exact = torch.nn.functional.rms_norm(x.double(), (32,), weight.double(), 1e-5)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(chosen.rms_norm(x, weight, 1e-5).double(), exact, **tolerance)
    heads = torch.randn(2, 4, 5, 8).to(dtype)
    for rows in (1, 2):
        angles = torch.rand(rows, 5, 4).repeat(1, 1, 2)
        positions = torch.arange(5).expand(rows, -1)
        turned = chosen.rotate(heads, angles.cos(), angles.sin(), positions)
        pairs = torch.view_as_complex(torch.stack((heads[..., :4], heads[..., 4:]), -1).double())
        spun = pairs * torch.polar(torch.ones(rows, 1, 5, 4).double(), angles[:, None, :, :4].double())
        torch.testing.assert_close(turned.double(), torch.cat((spun.real, spun.imag), -1), **tolerance)


@pytest.mark.parametrize("padding", [False, True])
def test_a_model_on_gaudis_kernels_equals_stock(pair, gaudi, padding):
    stock, ours = pair()
    bind(ours, Execution(attention="fused_sdpa", ops="hpu"))
    ids = torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(ids)
    if padding:
        mask[1, :3] = 0
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)
    for model in (stock.train(), ours.train()):
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    counts = {name: len(found) for name, found in gaudi.items()}
    assert counts == {"FusedRMSNorm": 2 * 2 + 1, "FusedSDPA": 2, "RotaryPosEmbeddingHelperV2": 2 * 2}
    stock.eval()
    ours.eval()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **options), stock.generate(ids, **options))


# Loss and SwiGLU


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("trainable_head", [False, True])
def test_linear_cross_entropy_equals_the_whole_one(chunk, trainable_head):
    hidden = torch.randn(10, 16, requires_grad=True)
    weight = torch.randn(32, 16, requires_grad=trainable_head)
    targets = torch.randint(0, 32, (10,))
    targets[[0, 4, 9]] = ops.IGNORED
    nats, count, _ = ops.linear_cross_entropy(hidden, weight, targets, chunk)
    (nats * 0.7).backward()
    mine = hidden.grad.clone(), weight.grad
    hidden.grad = None
    weight.grad = None
    whole = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    (whole * 0.7).backward()
    torch.testing.assert_close(nats, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[0], hidden.grad, rtol=1e-5, atol=1e-5)
    if trainable_head:
        torch.testing.assert_close(mine[1], weight.grad, rtol=1e-5, atol=1e-5)
    assert count == 7
    with torch.no_grad():
        _, _, correct = ops.linear_cross_entropy(hidden, weight, targets, chunk)
    assert correct == ((hidden @ weight.T).argmax(-1) == targets).sum()


def test_linear_cross_entropy_without_a_target_is_zero():
    hidden = torch.randn(4, 8, requires_grad=True)
    nats, count, _ = ops.linear_cross_entropy(hidden, torch.randn(16, 8), torch.full((4,), ops.IGNORED), 2)
    nats.backward()
    assert nats == 0 and count == 0 and hidden.grad.abs().sum() == 0


@pytest.mark.parametrize("what", ["lora", "saved copy"])
def test_a_head_that_peft_has_wrapped_gives_the_same_loss(pair, what):
    from peft import LoraConfig, get_peft_model

    options = (
        {"target_modules": ["q_proj", "lm_head"]}
        if what == "lora"
        else {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    )
    losses = []
    ids = torch.randint(3, 64, (2, 9))
    for model in pair():
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options)).train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms = {n: p.grad.norm() for n, p in model.named_parameters() if p.requires_grad}
        losses.append((loss.detach(), norms))
    torch.testing.assert_close(losses[1][0], losses[0][0], rtol=1e-5, atol=1e-5)
    for name, norm in losses[0][1].items():
        torch.testing.assert_close(losses[1][1][name], norm, rtol=1e-4, atol=1e-5)


def test_swiglu_and_norm_gradients_by_finite_differences():
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: ops.swiglu(lambda _: a, lambda _: b, None), (gate, up))
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    ops.rms_norm(x, weight, 1e-5).square().sum().backward()
    mine = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    torch.nn.functional.rms_norm(x, (8,), weight, 1e-5).square().sum().backward()
    torch.testing.assert_close(mine[0], x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[1], weight.grad, rtol=1e-4, atol=1e-5)
