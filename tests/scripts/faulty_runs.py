"""Program of test_parity_faults.py: runs of the recipe, sound ones and such with a fault that a plausible change could bring.

python faulty_runs.py FOLDER NAME...: each NAME becomes a run folder FOLDER/NAME. `sound`, `dropout` and `evaluated` have no fault; the
others are in FAULTS, each a context manager around the run and the options it needs.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import torch

BASE = [
    "+experiment=tiny", "runtime=cpu", "train.max_steps=3", "train.tensorboard=false", "data.show_samples=0", "trace_steps=2",
]  # fmt: skip
DROPOUT = ["adapter.lora_dropout=0.1"]
CHECKPOINTING = ["train.gradient_checkpointing=true", "train.gradient_checkpointing_use_reentrant=true"]


@contextlib.contextmanager
def sound():
    yield


@contextlib.contextmanager
def residual_dropped():
    from modeling.llama import LlamaDecoderLayer

    def forward(self, x, mask, rope, cache=None):
        x = self.execution.add_residual(self.self_attn(self.input_layernorm(x), mask, rope, cache), x)
        branch = self.mlp(self.post_attention_layernorm(x))
        return (branch if self.self_attn.layer == 1 else branch + x,)

    with mock.patch.object(LlamaDecoderLayer, "forward", forward):
        yield


@contextlib.contextmanager
def heads_permuted():
    from modeling.execution import Execution
    from modeling.llama import LlamaAttention

    usual, build = LlamaAttention.forward, Execution.__init__
    inside = []

    def forward(self, *arguments):
        inside.append(self.layer)
        try:
            return usual(self, *arguments)
        finally:
            inside.pop()

    def init(self, *arguments, **options):
        build(self, *arguments, **options)
        attend = self.attend
        self.attend = lambda *given: _swap(attend(*given)) if inside == [1] else attend(*given)

    def _swap(out):
        return out[:, :, [1, 0, 2, 3]]

    with mock.patch.object(LlamaAttention, "forward", forward), mock.patch.object(Execution, "__init__", init):
        yield


@contextlib.contextmanager
def rotary_in_bf16():
    from modeling.llama import LlamaRotaryEmbedding

    usual = LlamaRotaryEmbedding.forward
    with mock.patch.object(
        LlamaRotaryEmbedding, "forward", lambda self, at: tuple(t.bfloat16().float() for t in usual(self, at))
    ):
        yield


@contextlib.contextmanager
def labels_shifted_twice():
    from modeling import llama

    usual = llama.shifted_targets
    with mock.patch.object(llama, "shifted_targets", lambda labels: usual(usual(labels))):
        yield


@contextlib.contextmanager
def labels_of(choose):
    from recipes.pipeline.batches import Collator

    usual = Collator.__call__

    def call(self, rows):
        batch = usual(self, rows)
        batch["labels"] = choose(batch)
        return batch

    with mock.patch.object(Collator, "__call__", call):
        yield


def padding_scored():
    return labels_of(lambda batch: torch.where(batch["attention_mask"].eq(0), batch["input_ids"], batch["labels"]))


def loss_on_the_prompt():
    def other(batch):
        prompt = batch["labels"].eq(-100) & batch["attention_mask"].eq(1)
        return torch.where(prompt, batch["input_ids"], -100)

    return labels_of(other)


@contextlib.contextmanager
def mean_of_batch_means():
    from recipes.pipeline.metrics import EvaluationSums, perplexity

    def result(self, runtime):
        rows = torch.stack(self.sums)
        loss = (rows[:, 0] / rows[:, 1]).mean().item()
        total = rows.sum(0).tolist()
        return {
            "eval_loss": loss,
            "perplexity": perplexity(loss),
            "eval_accuracy": total[2] / total[1],
            "eval_targets": int(total[1]),
        }

    with mock.patch.object(EvaluationSums, "result", result):
        yield


@contextlib.contextmanager
def lora_alpha_ignored():
    from peft.tuners.lora import LoraLayer

    usual = LoraLayer.update_layer

    def update(self, adapter_name, *arguments, **options):
        usual(self, adapter_name, *arguments, **options)
        self.scaling[adapter_name] = 1.0

    with mock.patch.object(LoraLayer, "update_layer", update):
        yield


@contextlib.contextmanager
def norm_epsilon():
    from modeling.llama import LlamaDecoderLayer

    usual = LlamaDecoderLayer.__init__

    def init(self, config, layer, execution):
        usual(self, config, layer, execution)
        if layer == 1:
            self.post_attention_layernorm.eps = 1e-2

    with mock.patch.object(LlamaDecoderLayer, "__init__", init):
        yield


@contextlib.contextmanager
def dropout_in_evaluation():
    with mock.patch.object(torch.nn.Dropout, "forward", lambda self, x: torch.nn.functional.dropout(x, self.p, True)):
        yield


@contextlib.contextmanager
def in_place_in_training():
    """With the checkpoint that optimum-habana puts in place of torch's: DeepSpeed's, which runs forward without gradients."""
    import transformers.modeling_utils
    from deepspeed.runtime.activation_checkpointing.checkpointing import CheckpointFunction

    def checkpoint(function, *arguments, use_reentrant=None):
        outputs = []
        CheckpointFunction.apply(function, outputs, *arguments)
        return tuple(outputs)

    with mock.patch.object(transformers.modeling_utils, "checkpoint", checkpoint):
        yield


@contextlib.contextmanager
def adapter_not_loaded():
    from recipes.pipeline import adapter

    usual = adapter.add_adapter

    def add(*arguments):
        wrapped = usual(*arguments)
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.data.zero_()
        return wrapped

    with mock.patch.object(adapter, "add_adapter", add):
        yield


@contextlib.contextmanager
def one_ranks_gradient_missing():
    """Rank 1's loss leaves no gradient, as when its backward is skipped."""
    import os

    from recipes.pipeline.trainer import LoraTrainerMixin

    usual = LoraTrainerMixin.compute_loss

    def loss(self, *arguments, **options):
        found = usual(self, *arguments, **options)
        return found * 0.0 if os.environ.get("RANK") == "1" and not isinstance(found, tuple) else found

    with mock.patch.object(LoraTrainerMixin, "compute_loss", loss):
        yield


EVALUATION = ["train.do_train=false", "trace_steps=0"]
FAULTS = {
    "sound": (sound, []),
    "dropout": (sound, DROPOUT),
    "checkpointed": (sound, CHECKPOINTING),
    "evaluated": (sound, EVALUATION),
    "other_batch": (sound, ["train.per_device_eval_batch_size=3"]),
    "two_ranks": (sound, ["train.per_device_train_batch_size=2"]),
    "residual_dropped": (residual_dropped, []),
    "heads_permuted": (heads_permuted, []),
    "rotary_in_bf16": (rotary_in_bf16, []),
    "labels_shifted_twice": (labels_shifted_twice, []),
    "padding_scored": (padding_scored, []),
    "loss_on_the_prompt": (loss_on_the_prompt, []),
    "mean_of_batch_means": (mean_of_batch_means, []),
    "lora_alpha_ignored": (lora_alpha_ignored, []),
    "norm_epsilon": (norm_epsilon, []),
    "dropout_in_evaluation": (dropout_in_evaluation, DROPOUT),
    "in_place_in_training": (in_place_in_training, [*CHECKPOINTING, "runtime.in_place_residual=true"]),
    "adapter_not_loaded": (adapter_not_loaded, EVALUATION),
    "one_ranks_gradient_missing": (one_ranks_gradient_missing, ["train.per_device_train_batch_size=2"]),
}


def main(home: Path, names: list[str]) -> None:
    from recipes.pipeline.compose import compose_here
    from recipes.pipeline.runtime import start

    adapter = [f"adapter.path={home / 'sound' / 'adapter'}"]
    configurations = {name: compose_here([*BASE, *FAULTS[name][1]]) for name in names}
    runtime = start(next(iter(configurations.values())))
    from transformers import set_seed

    for name, cfg in configurations.items():
        if FAULTS[name][1] is EVALUATION:
            cfg = compose_here([*BASE, *EVALUATION, *adapter])
        set_seed(cfg.seed)  # as each process of its own would
        with FAULTS[name][0]():
            one(cfg, runtime, home / name)
    runtime.leave()


def one(cfg, runtime, folder: Path) -> None:
    from recipes.pipeline import data, model, report, trainer

    report.open_run_folder(cfg, runtime, folder)
    arguments = trainer.training_arguments(cfg, runtime, folder)
    tokenizer = model.load_tokenizer(cfg.model)
    records = data.build_data(cfg, tokenizer, runtime.rank0_first)
    llama = model.build_model(cfg, tokenizer, runtime)
    report.introduce(runtime, folder, records, tokenizer, llama)
    coach = trainer.build_trainer(cfg, runtime, arguments, llama, tokenizer, records)
    report.finish(cfg, runtime, folder, trainer.run(cfg, runtime, coach))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(Path(sys.argv[1]), sys.argv[2:])
