"""What lives at the peak: our forward against transformers' own, with fake tensors at the 70B shape and with real ones."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama

from modeling.execution import Execution, bind
from modeling.liveness import LivePeak, allocator_peak
from modeling.llama import LlamaForCausalLM

ROWS, LENGTH, HIDDEN = 172, 2048, 8192  # the measured inference run


def test_it_equals_the_allocator():
    def work():
        x = torch.ones(1000, 1000)
        y = x + 1
        del x
        z = (y @ y).relu_()
        return (z.view(-1) * 2).sum()

    with LivePeak() as live:
        work()
    assert live.peak == pytest.approx(allocator_peak(work), rel=0.001)
    assert live.live <= 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_product_packs_can_be_left_out(dtype):
    x, weight = torch.ones(384, 256, dtype=dtype), torch.ones(256, 2048, dtype=dtype)
    result = 384 * 2048 * dtype.itemsize
    assert allocator_peak(lambda: x @ weight, packed=False) == result
    assert allocator_peak(lambda: torch.mm(x, weight).mul(2).sum(), packed=False) == pytest.approx(2 * result, rel=1e-4)
    assert result <= allocator_peak(lambda: x @ weight) <= result + 1.1 * weight.nbytes  # by the CPU's kernels


def test_it_equals_the_allocator_in_a_training_step(pair):
    _, ours = pair(hidden_size=128, intermediate_size=1024, vocab_size=512)
    ids = torch.randint(0, 512, (8, 128))

    def step():
        ours.zero_grad(set_to_none=True)
        ours.train()(ids, labels=ids).loss.backward()

    step()
    ours.zero_grad(set_to_none=True)
    with LivePeak() as live:
        step()
    ours.zero_grad(set_to_none=True)
    assert live.peak == pytest.approx(allocator_peak(step), rel=0.02)


def tensors_at_peak(model_class, ranks: int, execution: Execution | None = None) -> float:
    """Peak above the weights in units of one (batch, seq, hidden) tensor, bf16, last-position logits, 3 layers."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=HIDDEN, intermediate_size=28672 // ranks, num_hidden_layers=3, head_dim=128,
        num_attention_heads=64 // ranks, num_key_value_heads=8 // ranks, use_cache=False,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = model_class(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        if execution is not None:
            bind(model, execution)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        with torch.no_grad(), LivePeak() as live:
            model(ids, logits_to_keep=1)
    return live.peak / (ROWS * LENGTH * HIDDEN * 2)


@pytest.mark.parametrize(("ranks", "stock", "lifetimes", "both"), [(8, 7.13, 5.00, 4.00), (1, 14.63, 10.00, 9.00)])
def test_inference_peak_at_the_70b_shape(ranks, stock, lifetimes, both):
    found = tensors_at_peak(StockLlama, ranks)
    without = tensors_at_peak(LlamaForCausalLM, ranks, Execution(in_place_residual=False))
    with_add = tensors_at_peak(LlamaForCausalLM, ranks)
    assert found == pytest.approx(stock, abs=0.02)
    assert without == pytest.approx(lifetimes, abs=0.01)  # what no longer outlives its need
    assert without - with_add == pytest.approx(1.0, abs=0.001)  # the in-place add alone: one whole tensor
    assert with_add == pytest.approx(both, abs=0.01)
    assert found - with_add >= 2.0


def test_the_measured_tensor_is_5_3_gib():
    assert pytest.approx(5.3, abs=0.1) == ROWS * LENGTH * HIDDEN * 2 / 1024**3


def test_inference_peak_with_real_allocations():
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, use_cache=False,
    )  # fmt: skip
    stock = StockLlama(config).eval()
    ours = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 512, (8, 256))
    unit = 8 * 256 * 256 * 4
    peaks = {}
    with torch.no_grad():
        for name, model, setting in (("stock", stock, None), ("not in place", ours, False), ("ours", ours, None)):
            if model is ours:
                bind(ours, Execution(in_place_residual=setting))
            model(ids, logits_to_keep=1)
            peaks[name] = allocator_peak(lambda model=model: model(ids, logits_to_keep=1)) / unit
    assert peaks["not in place"] - peaks["ours"] == pytest.approx(1.0, abs=0.1)
    assert peaks["stock"] - peaks["ours"] >= 2.0


def trained(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def test_trainings_peak_is_the_same_to_the_byte_with_the_switch_on_and_off(pair):
    peaks = []
    ids = torch.randint(0, 64, (4, 32))
    for setting in (False, None):
        _, ours = pair(use_cache=False)
        bind(ours, Execution(in_place_residual=setting))
        model = trained(ours).train()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        with LivePeak() as live:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_training_peak_is_a_third_lower_than_stocks():
    # SmolLM2-135M's shape, less layers: the head's logits and what the layers keep both count
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 49152, (4, 128))
    peaks = []
    for model_class in (StockLlama, LlamaForCausalLM):
        model = trained(model_class(config)).train()
        bind(model, Execution(loss_chunk=256))
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        with LivePeak() as live:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(live.peak)
    assert peaks[1] <= 0.65 * peaks[0]


def test_logits_of_a_long_prefill_are_the_last_ones_only(pair):
    _, ours = pair(max_position_embeddings=1024, vocab_size=49152)
    ids = torch.randint(3, 49152, (1, 1000))
    shapes = []
    ours.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    ours.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert shapes == [(1, 1, 49152)] * 2


def test_bytes_of_smollm2s_cache():
    from modeling.cache import StaticKeyValues

    config = LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    assert StaticKeyValues(config, 1, 128).nbytes() == 2 * 30 * 3 * 64 * 128 * 4 == 5_898_240
