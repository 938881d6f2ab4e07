"""Schema of conf/: every option, its type, its default and its unit. Defaults live here and nowhere else.

A recipe is `@recipe("lora")` around a function of the resolved config. Composing happens through Hydra; whatever is wrong
with a key or a value ends in one line that names the key, the value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class InputError(ValueError):
    """Something the user can mend: the message is one line that names the file, row, key or option and the way out."""


Dtype = Enum("Dtype", ["float32", "bfloat16"])
Implementation = Enum("Implementation", ["vendored", "stock"])
Holdout = Enum("Holdout", ["random", "first"])
Template = Enum("Template", ["alpaca", "llama2_chat", "llama3_chat", "tokenizer"])
LossOn = Enum("LossOn", ["response", "all"])
Batching = Enum("Batching", ["padded", "concatenated", "packed"])
TooLong = Enum("TooLong", ["truncate", "drop"])
Side = Enum("Side", ["left", "right"])
AdapterKind = Enum("AdapterKind", ["lora", "none"])
Bias = Enum("Bias", ["none", "all", "lora_only"])
Device = Enum("Device", ["auto", "cpu", "cuda", "hpu", "lazy"])
Attention = Enum("Attention", ["auto", "eager", "sdpa", "flex", "fused_sdpa"])
Ops = Enum("Ops", ["auto", "eager", "hpu"])
Strategy = Enum("Strategy", ["no", "steps", "epoch"])
Scheduler = Enum("Scheduler", ["linear", "cosine", "constant", "constant_with_warmup"])


@dataclass
class ModelConfig:
    # folder | FILE.gguf | hub id | package:NAME/FILE.gguf (a file inside an installed package) | random (built from `config`)
    name_or_path: str = MISSING
    revision: str | None = None  # hub revision
    config: dict[str, Any] = field(default_factory=dict)  # LlamaConfig fields, for name_or_path=random only
    tokenizer: str | None = None  # null: the model's own; bytes: one id per byte, for random models; else folder or hub id
    pad_token: str | None = None  # null: the model's own; else a token that the vocabulary already holds
    dtype: Dtype = Dtype.float32  # of the frozen weights
    implementation: Implementation = Implementation.vendored  # stock: transformers' own Llama, for comparison
    cache_dir: str | None = None  # converted GGUF weights; null: ~/.cache/llama-lora-gaudi/models


@dataclass
class ColumnsConfig:
    instruction: str = "instruction"
    input: str | None = "input"  # null, or absent from a record: no input
    output: str = "output"


@dataclass
class DataConfig:
    path: str = MISSING  # JSON, JSONL, CSV, Parquet file | folder of these | hub id
    split: str = "train"  # hub data sets only
    eval_path: str | None = None  # held-out file, folder or hub id; null: a share of `path`
    eval_split: str | None = None  # held-out split of the hub data set; null: a share of `split`
    validation_split_percentage: float = 10.0  # percent of the records held out when there is no eval_path or eval_split
    holdout: Holdout = Holdout.random  # which records are held out: random (by seed) or the first ones of the file
    holdout_seed: int = 42  # apart from `seed`, so that other training seeds are evaluated on the same records
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    template: Template = Template.alpaca
    system_prompt: str | None = None  # chat templates only
    loss_on: LossOn = LossOn.response
    batching: Batching = Batching.padded
    max_seq_length: int = 512  # tokens
    too_long: TooLong = TooLong.truncate  # of the response; a record without any target left is dropped and counted
    pad_to_multiple_of: int = 8  # tokens
    pad_to_max_length: bool = False  # every batch max_seq_length long: one shape, one graph
    padding_side: Side = Side.right
    max_train_samples: int | None = None  # records
    max_eval_samples: int | None = None  # records
    cache_dir: str | None = None  # tokenised data; null: ~/.cache/llama-lora-gaudi/data
    show_samples: int = 2  # decoded samples printed at the start, trained tokens marked


@dataclass
class AdapterConfig:
    kind: AdapterKind = AdapterKind.lora
    path: str | None = None  # a finished adapter to evaluate or to train on
    r: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    modules_to_save: list[str] = field(default_factory=list)
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    bias: Bias = Bias.none
    use_rslora: bool = False
    use_dora: bool = False
    dtype: Dtype | None = None  # of the adapter while training and in the file; null: float32, as PEFT does


@dataclass
class RuntimeConfig:
    device: Device = Device.auto
    cards: int | None = None  # ranks that the experiment is meant for; null: any
    lazy: bool | None = None  # graph (lazy) execution; null: on for devices hpu and lazy
    compile: bool = False  # torch.compile of the model; excludes lazy
    compile_backend: str | None = None  # null: hpu_backend on HPU, inductor elsewhere
    mark_step: bool | None = None  # graph breaks in the model; null: follows lazy
    layers_per_mark_step: int = 0  # one more break after every n decoder layers in inference; 0: none
    in_place_residual: bool | None = None  # null: the gate (neither training nor gradients); true only for parity runs
    attention: Attention = Attention.auto  # auto: fused_sdpa on HPU, sdpa elsewhere
    ops: Ops = Ops.auto  # RMSNorm and rotary kernels; auto: hpu on HPU, eager elsewhere
    attn_softmax_bf16: bool = False  # eager attention's softmax in bf16 instead of float32
    flash_attention_recompute: bool = False  # fused_sdpa only: recompute in backward
    flash_attention_fast_softmax: bool = False  # fused_sdpa only
    flash_attention_causal_mask: bool = False  # fused_sdpa only: triangular mask inside the kernel
    loss_chunk: int = 1024  # tokens whose logits exist at one time
    threads: int | None = None  # CPU threads of a rank; null: torch's own, or what the launcher set
    use_fused_adam: bool = False  # HPU only
    use_fused_clip_norm: bool = False  # HPU only
    pipelining_fwd_bwd: bool = False  # HPU lazy only: a graph break between forward and backward
    use_hpu_graphs_for_inference: bool = False  # HPU lazy only
    environment: dict[str, str] = field(default_factory=dict)  # set before the device's software is imported


@dataclass
class TrainConfig:
    """Names are those of transformers.TrainingArguments."""

    do_train: bool = True
    do_eval: bool = True
    eval_on_start: bool = True  # eval_loss_before
    max_steps: int = -1  # optimizer steps; -1: num_train_epochs decides
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8  # rows
    per_device_eval_batch_size: int = 8  # rows
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    lr_scheduler_type: Scheduler = Scheduler.cosine
    warmup_ratio: float = 0.03  # of the optimizer steps
    warmup_steps: int = 0  # above 0: overrides warmup_ratio
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    logging_steps: int = 1  # optimizer steps
    eval_strategy: Strategy = Strategy.no
    eval_steps: int | None = None  # with eval_strategy=steps
    eval_delay: float = 0  # steps or epochs before the first evaluation
    save_strategy: Strategy = Strategy.no  # the adapter is always saved at the end
    save_steps: int = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    resume_from_checkpoint: str | None = None  # folder checkpoint-N, or `last`
    gradient_checkpointing: bool = False
    gradient_checkpointing_use_reentrant: bool = False
    group_by_length: bool = True  # padded batches of like lengths
    dataloader_num_workers: int = 0
    dataloader_drop_last: bool = False
    throughput_warmup_steps: int = 0  # optimizer steps left out of samples/s and tokens/s
    tensorboard: bool = True


@dataclass
class BaselineConfig:
    name: str | None = None
    source: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # keys of all_results.json
    tolerance: dict[str, float] = field(default_factory=dict)  # absolute, two-sided; a metric without one is only reported


@dataclass
class LoraRecipe:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's own keys; empty: no DeepSpeed
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 42
    dry_run: bool = False  # resolve, check, print the run plan, stop
    debug: bool = False  # tracebacks, and each rank's messages
