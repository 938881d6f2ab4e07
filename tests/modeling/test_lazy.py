"""Lazy execution for real, on torch's own lazy engine: graphs are deferred, cut at breaks, compiled and cached.

Each test runs in a process of its own (a fork): the engine cannot be taken out of a process again.
"""

import json
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PRELUDE = """
import json, sys
import torch
from recipes.pipeline.runtime import start_lazy_engine
start_lazy_engine()
import torch._lazy.metrics as metrics
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama
from modeling.cache import StaticKeyValues
from modeling.execution import Execution, bind, mark_step_for
from modeling.llama import LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, use_cache=False)
stock = StockLlama(config).eval()
model = LlamaForCausalLM(config).eval()
model.load_state_dict(stock.state_dict())
model.to("lazy")
mark_step = mark_step_for("lazy", lazy=True)
bind(model, Execution(mark_step=mark_step))
def count(name):
    return metrics.counter_value(name) or 0
def lazy(*tensors):
    return [t.to("lazy") for t in tensors]
"""


@pytest.fixture
def run(warm_python):
    def start(body: str):
        command = [warm_python, "-c", PRELUDE + body]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return start


TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reference = torch.optim.SGD(stock.parameters(), lr=0.1)
result = []
model.train(); stock.train()
for step in range(6):
    length = LENGTHS[step % len(LENGTHS)]
    ids = torch.randint(0, 64, (3, length)); mask = torch.ones_like(ids); mask[0, length - 3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    metrics.reset()
    a, b, c = lazy(ids, mask, labels)
    loss = model(a, attention_mask=b, labels=c).loss
    loss.backward(); mark_step(); optimizer.step(); optimizer.zero_grad(); mark_step()
    value = loss.item()
    expected = stock(ids, attention_mask=mask, labels=labels).loss
    expected.backward(); reference.step(); reference.zero_grad()
    result.append([value, expected.item(), count("UncachedCompile"), count("MarkStep")])
print(json.dumps(result))
"""


def test_training_equals_eager_and_stops_compiling(run):
    steps = run("LENGTHS = [12]" + TRAIN)
    for value, expected, _, breaks in steps:
        assert value == pytest.approx(expected, abs=1e-5)
        assert breaks == 3  # ours before the layers, and the loop's own two
    assert steps[0][2] > 0
    assert [compiled for _, _, compiled, _ in steps[2:]] == [0, 0, 0, 0]


def test_padding_buckets_bound_the_compilations(run):
    one, two = ([step[2] for step in run(f"LENGTHS = {lengths}" + TRAIN)] for lengths in ([16], [16, 24]))
    assert sum(one) < sum(two) <= 2 * sum(one) + 2  # the second bucket costs as much as the first, once
    assert two[4:] == [0, 0]


def test_evaluation_equals_eager_with_its_breaks(run):
    rows = run(
        """
ids = torch.randint(0, 64, (3, 12))
result = []
with torch.no_grad():
    for every in (0, 2):
        bind(model, Execution(mark_step=mark_step, layers_per_mark_step=every))
        for _ in range(3):
            metrics.reset()
            a, = lazy(ids)
            out = model(a, labels=a, logits_to_keep=torch.empty(0, dtype=torch.long, device="lazy"))
            breaks = count("MarkStep")
            mark_step()
            result.append([out.loss.item(), stock(ids, labels=ids).loss.item(), breaks, count("UncachedCompile")])
print(json.dumps(result))
"""
    )
    for value, expected, *_ in rows:
        assert value == pytest.approx(expected, abs=1e-5)
    assert [row[2] for row in rows] == [1, 1, 1, 3, 3, 3]  # with a break every 2 of 4 layers: two more
    assert [rows[2][3], rows[5][3]] == [0, 0]  # after two passes nothing is compiled any more


def test_static_cache_decoding_is_one_set_of_graphs_for_any_text(run):
    result = run(
        """
texts, compiled = [], []
cache = StaticKeyValues(config, 3, 40, device="lazy")
with torch.no_grad():
    for batch in range(4):
        ids = torch.randint(3, 64, (3, 12))
        cache.reset()
        a, = lazy(ids)
        metrics.reset()
        token = model(a, past_key_values=cache, cache_position=torch.arange(12, device="lazy"), logits_to_keep=1).logits
        token = token.argmax(-1); mark_step()
        found, steps = [token], []
        for _ in range(9):
            token = model(token, past_key_values=cache, cache_position=cache.position.reshape(1)).logits.argmax(-1)
            mark_step(); steps.append(count("UncachedCompile"))
            found.append(token)
        compiled.append(count("UncachedCompile"))
        found = torch.cat([t.cpu() for t in found], 1)
        expected = stock.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True)
        texts.append([found.tolist(), expected[:, 12:].tolist()])
print(json.dumps([texts, compiled, steps]))
"""
    )
    texts, compiled, _ = result
    assert all(found == expected for found, expected in texts)
    assert compiled[0] > 0 and compiled[2:] == [0, 0]


def test_gradient_checkpointing_of_both_kinds(run):
    rows = run(
        """
result = []
ids = torch.randint(0, 64, (3, 12))
stock.train()(ids, labels=ids).loss.backward()
for reentrant in (True, False):
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    a, = lazy(ids)
    loss = model.train()(a, labels=a).loss
    loss.backward(); mark_step()
    worst = max((p.grad.cpu() - q.grad).abs().max().item() for p, q in zip(model.parameters(), stock.parameters()))
    result.append([loss.item(), worst])
print(json.dumps([stock(ids, labels=ids).loss.item(), result]))
"""
    )
    expected, found = rows
    for loss, worst in found:
        assert loss == pytest.approx(expected, abs=1e-5) and worst < 1e-5
