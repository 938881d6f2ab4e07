"""The gate of the in-place residual add: what it saves is measured elsewhere, here is what it must never show or break."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from modeling.execution import Execution, bind, mark_step_for
from modeling.llama import LlamaModel

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(3))


class Watcher(Execution):
    """Counts the sums that went into the residual's own memory."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.in_place = self.sums = 0

    def add_residual(self, x, residual):
        total = super().add_residual(x, residual)
        self.sums += 1
        self.in_place += total.data_ptr() == residual.data_ptr()
        return total


def watched(model) -> Watcher:
    execution = Watcher()
    bind(model, execution)
    return execution


def test_in_place_in_inference_only(pair):
    stock, ours = pair()
    execution = watched(ours)
    expected = stock(IDS).logits
    assert torch.equal(ours(IDS).logits, ours(IDS).logits) and execution.in_place == 0  # gradients are on
    with torch.no_grad():
        found = ours(IDS).logits
        assert execution.in_place == 4  # two layers, two sums each
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        ours.train()
        ours(IDS)
        assert execution.in_place == 4
        ours.eval()
        ours.model.layers[1].train()  # any part in training closes the gate
        ours(IDS)
        assert execution.in_place == 4
    ours.eval()
    with torch.inference_mode():
        torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert execution.in_place == 8


@pytest.mark.parametrize("setting", [False, True, None])
def test_the_switch_changes_no_number_in_inference(pair, setting):
    stock, ours = pair()
    bind(ours, Execution(in_place_residual=setting))
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
        assert torch.equal(ours.generate(IDS, **options), stock.generate(IDS, **options))


def test_what_a_caller_holds_keeps_its_value(pair):
    _, ours = pair()
    execution = watched(ours)
    with torch.no_grad():
        embeddings = ours.get_input_embeddings()(IDS)
        before = embeddings.clone()
        ours(inputs_embeds=embeddings)
        assert torch.equal(embeddings, before) and execution.in_place == 3  # the first sum makes a tensor of our own
        with torch.enable_grad():
            expected = ours(IDS, output_hidden_states=True).hidden_states
        for one, other in zip(ours(IDS, output_hidden_states=True).hidden_states, expected, strict=True):
            torch.testing.assert_close(one, other)
        states = ours(inputs_embeds=embeddings, output_hidden_states=True).hidden_states
        torch.testing.assert_close(states[0], before)
        cache = ours(IDS, use_cache=True).past_key_values
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        ours(IDS[:, :1], past_key_values=copy.deepcopy(cache))
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hooks_see_values_that_stay(pair, kind):
    stock, ours = pair()
    names = [name for name, _ in ours.named_modules() if name]

    def record(model):
        seen = {}

        def keep(name):
            def forward(module, inputs, output):
                seen[name] = output[0] if isinstance(output, tuple) else output

            def before(module, inputs):
                if inputs and isinstance(inputs[0], torch.Tensor):
                    seen[name] = inputs[0]

            return forward if kind == "forward" else before

        handles = []
        for name in names:
            module = model.get_submodule(name)
            register = module.register_forward_hook if kind == "forward" else module.register_forward_pre_hook
            handles.append(register(keep(name)))
        with torch.no_grad():
            model(IDS, use_cache=False)
        for handle in handles:
            handle.remove()
        return seen

    ours_seen, stock_seen = record(ours), record(stock)
    skipped = ("rotary_emb", "self_attn", "layers", "model")
    compared = 0
    for name, value in ours_seen.items():
        both = isinstance(value, torch.Tensor) and isinstance(stock_seen.get(name), torch.Tensor)
        if both and value.is_floating_point() and not name.endswith(skipped):
            torch.testing.assert_close(value, stock_seen[name], rtol=1e-4, atol=1e-5, msg=name)
            compared += 1
    assert compared >= 15


def test_one_hook_alone_closes_the_gate_and_an_embedding_hook_keeps_its_output(pair):
    _, ours = pair()
    execution = watched(ours)
    kept = []
    handle = ours.model.layers[0].register_forward_hook(lambda module, inputs, output: kept.append(output[0]))
    with torch.no_grad():
        ours(IDS)
    handle.remove()
    assert execution.in_place == 0
    outputs = []
    ours.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: outputs.append((output, output.clone()))
    )
    with torch.no_grad():
        ours(IDS)
    assert execution.in_place == 3 and torch.equal(*outputs[0])


def lora(model):
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return wrapped


def gradients(model, labels=IDS):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=labels).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("checkpointing", ["none", "re-entrant", "non-re-entrant", "deepspeed"])
@pytest.mark.parametrize("adapters", [False, True])
def test_losses_and_gradients_equal_stocks_in_every_mode(pair, mode, checkpointing, adapters, monkeypatch):
    stock, ours = pair(use_cache=False)
    execution = watched(ours)
    if checkpointing != "none":
        ours.gradient_checkpointing_enable({"use_reentrant": checkpointing != "non-re-entrant"})
        ours.enable_input_require_grads()
    if checkpointing == "deepspeed":
        use_deepspeeds_checkpoint(ours)
    if adapters:
        stock, ours = lora(stock), lora(ours)
    for _ in range(2):  # train -> inference -> train in one process
        getattr(stock, mode)()
        getattr(ours, mode)()
        (loss, mine), (expected, theirs) = gradients(ours), gradients(stock)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        assert mine.keys() == theirs.keys() and (len(mine) == 16 if adapters else len(mine) == 20 + 1)
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5, msg=name)
        assert execution.in_place == 0
        ours.eval()
        with torch.no_grad():
            ours(IDS)
        assert execution.in_place > 0
        execution.in_place = 0


def use_deepspeeds_checkpoint(model):
    # what GaudiTrainer puts in place of torch's: positional arguments, always a tuple
    from deepspeed.runtime.activation_checkpointing import checkpointing

    def run(function, *args, **unused):
        outputs = []
        checkpointing.CheckpointFunction.apply(function, outputs, *args)
        return tuple(outputs)

    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = run


def train(model, steps=10):
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_forced_in_place_under_deepspeeds_checkpoint_stands_still_without_an_error(pair):
    # The measured runs' set-up: gradients are off in its forward, so "gradients off" is no sufficient gate
    runs = {}
    for name, setting in (("gate", None), ("forced", True)):
        _, ours = pair(use_cache=False)
        bind(ours, Execution(in_place_residual=setting))
        ours.gradient_checkpointing_enable()
        ours.enable_input_require_grads()
        use_deepspeeds_checkpoint(ours)
        runs[name] = train(lora(ours))
    stock = train(lora(pair(use_cache=False)[0]))
    torch.testing.assert_close(torch.tensor(runs["gate"]), torch.tensor(stock), rtol=1e-4, atol=1e-4)
    assert runs["gate"][-1] < runs["gate"][0] - 0.1
    assert max(runs["forced"]) - min(runs["forced"]) < 1e-6  # no step has any effect


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forced_in_place_elsewhere_makes_autograd_raise(pair, checkpointing):
    _, ours = pair(use_cache=False)
    bind(ours, Execution(in_place_residual=True))
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": True})
        ours.enable_input_require_grads()
    with pytest.raises(RuntimeError, match=r"in-?place|modified|view"):
        train(lora(ours), steps=2)


def test_checkpointing_runs_each_layer_twice_and_changes_nothing(pair):
    _, ours = pair(use_cache=False)
    calls = []
    for layer in ours.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    ours.train()
    _, plain = gradients(ours)
    assert len(calls) == 2
    calls.clear()
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    _, recomputed = gradients(ours)
    assert len(calls) == 4
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient)


def test_no_gradient_is_computed_below_the_first_adapter(pair):
    _, ours = pair(use_cache=False, num_hidden_layers=4)
    model = get_peft_model(ours, LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[2, 3]))
    asked = {}
    for index, layer in enumerate(ours.model.layers):
        layer.register_forward_hook(lambda m, i, output, index=index: asked.update({index: output[0].requires_grad}))
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert asked == {0: False, 1: False, 2: True, 3: True}


def test_graph_breaks_are_counted_where_configured_and_only_when_lazy(pair):
    stock, ours = pair(num_hidden_layers=4)
    calls = []
    bind(ours, Execution(mark_step=lambda: calls.append(1), layers_per_mark_step=2))
    expected = stock(IDS).logits
    ours.train()(IDS, labels=IDS).loss.backward()
    assert len(calls) == 1  # before the layers; the others belong to inference
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1 + 2
    calls.clear()
    ours.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert len(calls) == 3 * 3
    assert mark_step_for("cpu", lazy=False) is None and mark_step_for("hpu", lazy=False) is None
    with pytest.raises(ValueError, match="no lazy execution"):
        mark_step_for("cuda", lazy=True)


def test_bind_reaches_every_module_through_wrappers(pair):
    _, ours = pair()
    wrapped = lora(ours)
    execution = Execution()
    bind(wrapped, execution)
    holders = [module for module in wrapped.modules() if hasattr(module, "execution")]
    assert {id(module.execution) for module in holders} == {id(execution)} and len(holders) == 1 + 2 * (1 + 1 + 2) + 1
    assert isinstance(ours.model, LlamaModel)


def test_eager_execution_never_imports_habana():
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import sys, torch; from transformers import LlamaConfig; from modeling.llama import LlamaForCausalLM;"
        "m = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,"
        "num_attention_heads=2)); m(torch.zeros(1, 3, dtype=torch.long));"
        "print([n for n in sys.modules if 'habana' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["atention", ""])
def test_unknown_kernels_are_named(name):
    with pytest.raises(ValueError, match="is not one of: eager, sdpa, flex, fused_sdpa"):
        Execution(attention=name)
    with pytest.raises(ValueError, match="is not one of: eager, hpu"):
        Execution(ops=name)
