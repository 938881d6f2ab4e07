"""Plans against torch's own CPU allocator, run on the same step with real tensors."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

from modeling.decoding import FusedDecoder
from modeling.execution import Execution, bind
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
    return static, allocator_peak(lambda: stage.step(lambda phase: None))


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
