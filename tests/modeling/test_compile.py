"""torch.compile without graph breaks, equal to eager, and no recompilation at fixed shapes."""

import pytest
import torch

from modeling.cache import StaticKeyValues

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inference_and_training(pair, backend):
    stock, ours = pair(use_cache=False)
    compiled = torch.compile(ours, fullgraph=True, backend=backend, dynamic=False)
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(
                compiled(IDS, attention_mask=mask).logits, stock(IDS).logits, rtol=1e-4, atol=1e-4
            )
    stock.train()
    ours.train()
    stock(IDS, labels=IDS).loss.backward()
    loss = compiled(IDS, attention_mask=mask, labels=LABELS).loss
    loss.backward()
    torch.testing.assert_close(loss, stock(IDS, labels=IDS).loss, rtol=1e-5, atol=1e-5)
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            ours.zero_grad()
            compiled(torch.flip(IDS, [1]), attention_mask=mask, labels=LABELS).loss.backward()
        ours.eval()
        with torch.no_grad():
            compiled(torch.flip(IDS, [0]), attention_mask=mask)


@pytest.mark.slow
def test_decoding_with_a_cache_made_outside(pair):
    stock, ours = pair()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
    expected = stock.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)[:, 12:]
    cache = StaticKeyValues(ours.config, 2, 24)

    def decode():
        cache.reset()
        token = compiled(IDS, past_key_values=cache, cache_position=torch.arange(12), logits_to_keep=1).logits.argmax(
            -1
        )
        found = [token]
        for _ in range(7):
            token = compiled(
                token, past_key_values=cache, cache_position=cache.position.reshape(1).clone()
            ).logits.argmax(-1)
            found.append(token)
        return torch.cat(found, dim=1)

    with torch.no_grad():
        assert torch.equal(decode(), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(decode(), expected)
