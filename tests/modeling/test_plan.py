"""Plans against torch's own CPU allocator, run on the same step with real tensors."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

from modeling.decoding import FusedDecoder
from modeling.execution import Execution, bind
from modeling.lazy_memory import Zero3
from modeling.liveness import allocator_peak
from modeling.llama import LlamaForCausalLM
from modeling.memory import Setting, plan
from modeling.rehearsal import Workload, prepare

SHAPE = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
    "use_cache": False,
}  # fmt: skip


def builder(dtype=torch.float32, lora=False, checkpoint=None, **execution):
    def build(layers, cut):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).to(dtype)
        bind(model, Execution(**execution))
        if lora:
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
            model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.05, target_modules=targets))
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
            if checkpoint == "reentrant":
                model.enable_input_require_grads()
        return model

    return build


def fuse(model, length):
    return FusedDecoder(model, length)


CASES = {
    "evaluation": (builder(), Workload("evaluation", 2, 192), None),
    "evaluation, eager attention": (builder(attention="eager"), Workload("evaluation", 2, 192), None),
    "evaluation, eager attention, bf16": (builder(torch.bfloat16, attention="eager"), Workload("evaluation", 2, 192), None),
    "evaluation, bf16, padded": (builder(torch.bfloat16), Workload("evaluation", 2, 192, masked=True), None),
    "prompt, whole cache": (builder(), Workload("prompt", 2, 192, keys=256, masked=True), None),
    "prompt in chunks": (builder(), Workload("prompt", 2, 192, keys=256, whole=False, chunk=64), None),
    "prompt, joined weights, bf16": (builder(torch.bfloat16), Workload("prompt", 2, 192, keys=256, whole=False), fuse),
    "decoding, static cache": (builder(), Workload("decoding", 4, 192, keys=256, masked=True), None),
    "decoding, joined weights": (builder(), Workload("decoding", 4, 192, keys=256, whole=False), fuse),
    "training, AdamW on all weights": (builder(), Workload("training", 2, 192), None),
    "training, LoRA": (builder(lora=True), Workload("training", 2, 192), None),
    "training, LoRA, eager attention": (builder(lora=True, attention="eager"), Workload("training", 2, 192), None),
    "training, LoRA, checkpoints": (builder(lora=True, checkpoint="plain"), Workload("training", 4, 256), None),
    "training, LoRA, re-entrant": (builder(lora=True, checkpoint="reentrant"), Workload("training", 4, 256), None),
    "training, LoRA, chunked loss": (builder(lora=True, loss_chunk=64), Workload("training", 2, 192), None),
    "training, LoRA, packed": (builder(lora=True), Workload("training", 2, 192, packed=True), None),
    "training, LoRA, padded, bf16": (builder(torch.bfloat16, lora=True), Workload("training", 2, 192, masked=True), None),
    "training, LoRA, loss on 200 tokens": (builder(lora=True), Workload("training", 2, 192, targets=200), None),
    "training, LoRA, accumulated": (builder(lora=True), Workload("training", 2, 192, accumulated=True), None),
}  # fmt: skip


def measured(build, workload, fuse=None) -> tuple[dict[str, int], int]:
    """Static bytes by term and the allocator's peak beyond them, of 4 layers with real tensors."""
    torch.manual_seed(0)
    if not workload.accumulated:  # one step before, so that what is made once is there
        stage = prepare(build(4, None), workload, fuse=fuse)
        stage.step(lambda phase: None)
    else:
        stage = prepare(build(4, None), workload, fuse=fuse)
    static = {
        term: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        for term, tensors in stage.static.items()
    }
    return static, allocator_peak(lambda: stage.step(lambda phase: None), packed=False)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_equals_the_allocator(case):
    build, workload, fused = CASES[case]
    static, peak = measured(build, workload, fused)
    planned = plan(build, workload, Setting(), layers=4, fuse=fused)
    assert planned.static == {term: size for term, size in static.items() if size}
    assert sum(planned.peak.values()) == pytest.approx(peak, rel=0.001), planned.where
    assert (
        planned.eager
        == planned.nominal
        == planned.high
        == planned.low
        == sum(static.values()) + sum(planned.peak.values())
    )


def test_rows_of_a_deeper_model_follow_from_two_depths():
    build = builder(torch.bfloat16, lora=True, checkpoint="reentrant", attention="fused_sdpa", ops="hpu")
    work = Workload("training", 2, 256, optimizer=False)
    setting = Setting(
        "hpu", lazy=True, ranks=4, zero_stage=3, compound=10, zero3=Zero3(persistence=1000, prefetch=10**5, live=10**6)
    )
    whole = plan(build, work, setting, 9, depths=(9, 9))
    short = plan(build, work, setting, 9)
    assert whole.traced == 9 and short.traced == 5  # one layer ahead
    for name in ("static", "low", "nominal", "high", "end"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=0.001), name
    assert short.graph.count == pytest.approx(whole.graph.count, rel=0.02)
    for made in (short, whole):
        kept = next(live for live in made.top if live.kind == "kept for backward")
        assert (kept.count, kept.size) == (9 - 1, 8 * 2 * 256 * 256 * 2)  # the checkpoints between layers


def test_a_plan_names_the_tensors_of_its_peak():
    made = plan(builder(lora=True, checkpoint="reentrant"), Workload("training", 4, 256), Setting(), 4)
    kept = next(live for live in made.top if live.kind == "kept for backward" and live.module.endswith("layers.*"))
    assert kept.shape == (4, 256, 256) and kept.dtype == "float32" and kept.line.startswith("modeling/execution.py:")
    # the last layer's own are the first that backward gives back
    assert "modeling/ops.py:" in made.where and "backward" in made.where
    assert sum(live.size for live in made.top) == sum(made.peak.values()) - made.peak.get("kernel scratch", 0)


def test_the_in_place_add_is_seen_by_a_plan_and_training_is_blind_to_it():
    unit = 2 * 256 * 256 * 4

    def peak(kind, **execution):
        return plan(builder(**execution), Workload(kind, 2, 256, keys=256 * (kind == "prompt")), Setting(), 2).eager

    with_it, without = (peak("evaluation", in_place_residual=how) for how in (None, False))
    assert 0 <= without - with_it <= unit
    assert peak("training", in_place_residual=None) == peak("training", in_place_residual=False)


def test_decoding_writes_into_the_cache_and_holds_nothing_else():
    made = plan(builder(), Workload("decoding", 4, 256, keys=256, masked=True), Setting(), 4)
    assert (
        made.static["KV cache"] == 2 * 4 * 4 * 2 * 256 * 32 * 4
    )  # keys and values, layers, rows, heads, length, width, bytes
    assert made.end == sum(made.static.values())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rows": 0}, "rows 0: a step needs 1 or more"),
        ({"length": 0}, "length 0"),
        ({"kind": "dreaming"}, "workload 'dreaming' is not one of: training"),
        ({"kind": "prompt", "keys": 10}, "a cache of 10 tokens cannot hold 16"),
    ],
)
def test_a_workload_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        Workload(**{"kind": "training", "rows": 1, "length": 16, **fields})


def test_a_band_that_straddles_a_card_is_undecided():
    build = builder(torch.bfloat16, lora=True, attention="fused_sdpa", ops="hpu")
    made = plan(build, Workload("training", 2, 128, optimizer=False), Setting("hpu", lazy=True, compound=10), 3)
    assert made.low < made.nominal <= made.high and made.end < made.nominal
    assert made.verdict(made.high) == "fits"
    assert made.verdict(made.low - 1) == "does not fit"
    assert made.verdict((made.low + made.high) / 2) == "undecided"


# Independent oracles


def smollm2(layers, cut):
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_smollm2_by_hand():
    made = plan(smollm2, Workload("decoding", 1, 128, keys=128, masked=True), Setting(), 30)
    assert made.static["KV cache"] == 5_898_240
    assert made.static["weights"] == 134_515_008 * 4


def llama2_70b(layers, cut):
    config = LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    bind(model, Execution(loss_chunk=1024))
    return model


def test_accelerates_sizes_of_llama2_70b_are_the_planned_weights():
    from accelerate.utils.modeling import compute_module_sizes

    made = plan(llama2_70b, Workload("evaluation", 1, 128), Setting(), 80)
    with torch.device("meta"):
        assert made.static["weights"] == compute_module_sizes(llama2_70b(80, None))[""] == 68_976_648_192 * 2


def test_deepspeeds_estimators_where_all_weights_are_trained():
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    total, work = 68_976_648_192, Workload("training", 1, 128, optimizer=False)
    made = plan(llama2_70b, work, Setting(ranks=8, zero_stage=2, offload_optimizer=True), 80)
    _, theirs = estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=8, cpu_offload=True)
    # on the card stay the weights; a partition of the gradients is ours, theirs are all on the host
    assert made.static["weights"] == theirs == 2 * total
    made = plan(llama2_70b, work, Setting(ranks=8, zero_stage=3), 80)
    _, theirs, largest = estimate_zero3_model_states_mem_needs(
        total, 0, num_gpus_per_node=8, cpu_offload=False, cpu_offload_params=False
    )
    assert largest == 0
    # bf16 weights and gradients and 12 bytes of states; they count 2 more for gradients in float32
    small = sum(made.static.values()) - made.static["inputs"] - 16 * total / 8
    assert theirs - 16 * total / 8 == 2 * total / 8
    assert 0 <= small < 5 * 1024**2 * 8  # norms are whole on every rank


def test_torchs_tracker_sees_the_same_training_step():
    from torch.distributed._tools.mem_tracker import MemTracker

    build = builder(loss_chunk=64)  # what a kernel takes inside no tracker sees: a small chunk of logits makes it small
    made = plan(build, Workload("training", 4, 256, clip=False), Setting(), 4)
    model, ids = build(4, None).train(), torch.zeros(4, 256, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, ids)
    with tracker:
        step()
    seen = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert made.eager == pytest.approx(seen, rel=0.01)
