"""Schema of conf/: every option, its type, its default and its unit. Defaults live here and nowhere else.

`check` holds the rules between fields; what depends on the machine or the data is in preflight.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class InputError(ValueError):
    """Something the user can mend: the message is one line that names the file, row, key or option and the way out."""


def _choice(name: str, words: str) -> type[Enum]:
    return Enum(name, {word: word for word in words.split()})  # string values: OmegaConf then refuses numbers


Dtype = _choice("Dtype", "float32 bfloat16")
Implementation = _choice("Implementation", "vendored stock")
Holdout = _choice("Holdout", "random first")
Template = _choice("Template", "alpaca alpaca_joined llama2_chat llama3_chat tokenizer")
LossOn = _choice("LossOn", "response all")
Batching = _choice("Batching", "padded concatenated packed")
TooLong = _choice("TooLong", "truncate drop")
Side = _choice("Side", "left right")
AdapterKind = _choice("AdapterKind", "lora none")
Bias = _choice("Bias", "none all lora_only")
Device = _choice("Device", "auto cpu cuda hpu lazy")
Attention = _choice("Attention", "auto eager sdpa flex fused_sdpa")
Ops = _choice("Ops", "auto eager hpu")
Strategy = _choice("Strategy", "no steps epoch")
Scheduler = _choice("Scheduler", "linear cosine constant constant_with_warmup")
TooLongPrompt = _choice("TooLongPrompt", "refuse truncate skip")


@dataclass
class ModelConfig:
    # folder | FILE.gguf | hub id | package:NAME/FILE.gguf (a file inside an installed package) | random (built from `config`)
    name_or_path: str = MISSING
    revision: str | None = None  # hub revision
    config: dict[str, Any] = field(default_factory=dict)  # LlamaConfig fields, for name_or_path=random only
    # LlamaConfig's sizes of a model with weights, for plans on a machine that has not got them; nothing is built from it
    shape: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = (
        None  # null: the model's own; bytes: one id per byte, for random models; else folder or hub id
    )
    pad_token: str | None = None  # null: the model's own; else a token that the vocabulary already holds
    dtype: Dtype = Dtype.float32  # of the frozen weights
    implementation: Implementation = Implementation.vendored  # stock: transformers' own Llama, for comparison
    cache_dir: str | None = None  # converted GGUF weights; null: ~/.cache/llama-lora-gaudi/models


@dataclass
class ColumnsConfig:
    instruction: str = "instruction"  # the column (key) that holds it
    input: str | None = "input"  # null, or absent from a record: no input
    output: str = "output"  # the response


@dataclass
class DataConfig:
    path: str = MISSING  # JSON, JSONL, CSV, Parquet file | folder of these | hub id
    split: str = "train"  # hub data sets only
    eval_path: str | None = None  # held-out file, folder or hub id; null: a share of `path`
    eval_split: str | None = None  # held-out split of the hub data set; null: a share of `split`
    validation_split_percentage: float = (
        10.0  # percent of the records held out when there is no eval_path or eval_split
    )
    holdout: Holdout = Holdout.random  # which records are held out: random (by seed) or the first ones of the file
    holdout_seed: int = 42  # apart from `seed`, so that other training seeds are evaluated on the same records
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    # alpaca_joined: no newline before the response, tokenised as one text (the measured 70B run); needs loss_on=all
    template: Template = Template.alpaca
    system_prompt: str | None = None  # chat templates only
    loss_on: LossOn = LossOn.response  # tokens that are targets; all: the prompt's too
    # a record a row | rows cut from one stream of records | records side by side in a row, none sees another
    batching: Batching = Batching.padded
    max_seq_length: int = 512  # tokens
    too_long: TooLong = TooLong.truncate  # of the response; a record without any target left is dropped and counted
    pad_to_multiple_of: int = 8  # tokens
    pad_to_max_length: bool = False  # every batch max_seq_length long: one shape, one graph
    padding_side: Side = Side.right  # in training and evaluation
    max_train_samples: int | None = None  # records
    max_eval_samples: int | None = None  # records
    cache_dir: str | None = None  # tokenised data; null: ~/.cache/llama-lora-gaudi/data
    show_samples: int = 2  # decoded samples printed at the start, trained tokens marked


@dataclass
class AdapterConfig:
    kind: AdapterKind = AdapterKind.lora
    path: str | None = None  # a finished adapter to evaluate or to train on
    r: int = 8  # rank
    lora_alpha: float = 16.0  # the update is scaled by lora_alpha / r
    lora_dropout: float = 0.0  # share of the adapter's input, in training
    # names; all-linear: every one but the head
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    modules_to_save: list[str] = field(default_factory=list)  # trained and saved whole, beside the adapter
    rank_pattern: dict[str, int] = field(default_factory=dict)  # module -> a rank of its own
    alpha_pattern: dict[str, float] = field(default_factory=dict)  # module -> a lora_alpha of its own
    bias: Bias = Bias.none  # biases that are trained
    use_rslora: bool = False  # rank-stabilised: scaled by lora_alpha / sqrt(r)
    use_dora: bool = False  # magnitude and direction of a weight apart
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
    # fused_sdpa only; in training not with recompute; a forward of one token takes the usual softmax
    flash_attention_fast_softmax: bool = False
    loss_chunk: int = 1024  # tokens whose logits exist at one time
    threads: int | None = None  # CPU threads of a rank; null: torch's own, or what the launcher set
    use_fused_adam: bool = False  # HPU only
    use_fused_clip_norm: bool = False  # HPU only
    pipelining_fwd_bwd: bool = False  # HPU lazy only: a graph break between forward and backward
    use_hpu_graphs_for_inference: bool = False  # HPU lazy only
    environment: dict[str, str] = field(default_factory=dict)  # set before the device's software is imported
    plan_lag: int = 8  # memory plan of a lazy run, high figure: graphs that the device may be behind its host
    plan_delay: int = 2  # the same: ops until freed memory inside a graph is used again


@dataclass
class TrainConfig:
    """Names are those of transformers.TrainingArguments."""

    do_train: bool = True  # false: evaluate only
    do_eval: bool = True  # at the end
    eval_on_start: bool = True  # eval_loss_before
    max_steps: int = -1  # optimizer steps; -1: num_train_epochs decides
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8  # rows
    per_device_eval_batch_size: int = 8  # rows
    gradient_accumulation_steps: int = 1  # micro-batches of an optimizer step
    learning_rate: float = 1e-4  # at its highest
    lr_scheduler_type: Scheduler = Scheduler.cosine  # after warm-up
    warmup_ratio: float = 0.03  # of the optimizer steps
    warmup_steps: int = 0  # above 0: overrides warmup_ratio
    weight_decay: float = 0.0  # AdamW's
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # norm of all gradients together; 0: not clipped
    logging_steps: int = 1  # optimizer steps
    eval_strategy: Strategy = Strategy.no  # evaluations during training
    eval_steps: int | None = None  # optimizer steps, with eval_strategy=steps
    eval_delay: float = 0  # steps or epochs before the first evaluation
    save_strategy: Strategy = Strategy.no  # the adapter is always saved at the end
    save_steps: int = 500  # optimizer steps, with save_strategy=steps
    save_total_limit: int | None = None  # newest checkpoints that are kept; null: all
    load_best_model_at_end: bool = False  # the checkpoint of the lowest eval loss
    resume_from_checkpoint: str | None = None  # folder checkpoint-N, or `last`
    gradient_checkpointing: bool = False  # activations are computed again in backward: less memory, more time
    gradient_checkpointing_use_reentrant: bool = False  # torch's older kind
    group_by_length: bool = True  # padded batches of like lengths
    dataloader_num_workers: int = 0  # processes a rank
    dataloader_drop_last: bool = False  # leave the last, smaller batch out
    throughput_warmup_steps: int = 0  # optimizer steps left out of samples/s and tokens/s
    tensorboard: bool = True  # event files in the run folder


@dataclass
class GenerateConfig:
    # Prompts: one of these three

    prompt: list[str] = field(default_factory=list)  # texts: "generate.prompt=['Name three colors.']"
    file: str | None = (
        None  # .txt (a prompt a line), .json, .jsonl: texts, {"prompt": ...}, or records as data.columns says
    )
    held_out: bool = False  # the held-out records of data
    template: bool = True  # a text is an instruction in data.template; false: text or record is continued as it stands
    max_prompts: int | None = None  # the first so many
    max_prompt_tokens: int | None = None  # null: what the model's positions leave beside max_new_tokens
    # of a prompt; refuse, skip (an empty line with finish_reason=too_long), or truncate: the record's longer field is
    # shortened from its end, never the template around it; a text loses its beginning
    too_long: TooLongPrompt = TooLongPrompt.refuse
    max_new_tokens: int = 128  # tokens a completion has at most
    temperature: float = 0.0  # 0: greedy, the most likely token
    top_k: int = 0  # most likely tokens to draw from; 0: all
    top_p: float = 1.0  # smallest set of tokens with this share of the probability
    repetition_penalty: float = 1.0  # divides the score of a token that prompt or text already hold
    stop: list[str] = field(default_factory=list)  # texts that end a completion; left out of it
    ignore_eos: bool = False  # always max_new_tokens; for measurements
    batch_size: int | str = 8  # rows a rank; auto: from the memory plan, halved where a rank alone runs out of memory
    output: str | None = None  # JSONL, a line a prompt in input order, resumed if half-written; null: in the run folder
    stream: bool | None = None  # the text of a single prompt on the terminal as it comes; null: where there is one
    tensor_parallel: int = 1  # ranks that share one model; rows are dealt over the groups

    # How it is executed

    length_bucket: int | None = (
        None  # prompts are padded to a multiple of this; null: 128 where graphs are kept, 1 in eager
    )
    prefill_chunk: int = 0  # prompt tokens a forward; 0: the whole prompt
    stop_check: int | None = None  # tokens between looks at whether all rows ended; null: 1 on a CPU, 16 on a card
    fused: bool = True  # join weights of one input where the device runs op by op; false: the modules as they are
    compact: bool | None = None  # when half of the rows have ended, go on with the others only; null: in eager


@dataclass
class BaselineConfig:
    name: str | None = None
    source: str = ""
    command: str | None = None  # that made it
    metrics: dict[str, float] = field(default_factory=dict)  # keys of all_results.json
    tolerance: dict[str, float] = field(
        default_factory=dict
    )  # absolute, two-sided; a metric without one is only reported
    facts: dict[str, Any] = field(default_factory=dict)  # what a run must share to be comparable (scripts/results.py)
    settings: dict[str, Any] = field(default_factory=dict)  # the run's options, flat
    steps: dict[str, Any] = field(default_factory=dict)  # step -> loss, grad_norm, learning_rate


@dataclass
class LoraRecipe:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's own keys; empty: no DeepSpeed
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 42  # of adapter, order of records, dropout and drawing
    dry_run: bool = False  # resolve, check, print the run plan, stop
    debug: bool = False  # tracebacks, and each rank's messages
    samples: int = 0  # held-out prompts that base and adapter answer at the end, into samples.md
    sample_tokens: int = 64  # new tokens of such an answer
    memory_curve: bool = (
        False  # memory.png: one step's memory beside what was planned for it (traces the model: seconds)
    )
    trace_steps: int = 0  # optimizer steps whose tensors are fingerprinted into trace.jsonl, for scripts/parity.py


@dataclass
class GenerateRecipe(LoraRecipe):
    """One experiment file serves both recipes: the groups of training are here too, and only those of the model are used."""

    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        self.train.do_train = self.train.gradient_checkpointing = False  # an experiment's, for the other recipe


def check(cfg: LoraRecipe) -> None:
    """Rules between fields, without a look at the machine. Raises InputError for the first that is broken."""
    if isinstance(cfg, GenerateRecipe):
        return check_generation(cfg)
    _check_ranges(cfg)
    _check_runtime(cfg.runtime)
    _check_deepspeed(cfg)
    model, data, train, adapter = cfg.model, cfg.data, cfg.train, cfg.adapter
    if train.do_train and cfg.runtime.flash_attention_fast_softmax and cfg.runtime.flash_attention_recompute:
        raise InputError(
            "runtime.flash_attention_fast_softmax=true and flash_attention_recompute=true: the kernel takes both in training"
            " only without a mask, and batches have one; leave one out"
        )
    if (model.name_or_path == "random") != bool(model.config):
        raise InputError("model.config belongs to model.name_or_path=random, and only to it")
    if data.validation_split_percentage == 0 and train.do_eval and not (data.eval_path or data.eval_split):
        raise InputError(
            "data.validation_split_percentage=0 leaves nothing to evaluate; set data.eval_path or train.do_eval=false"
        )
    if data.validation_split_percentage == 0 and cfg.samples and not (data.eval_path or data.eval_split):
        raise InputError(
            f"samples={cfg.samples} are held-out records, and none is held out; set data.eval_path or samples=0"
        )
    if train.do_train and adapter.kind is AdapterKind.none:
        raise InputError("adapter=none has nothing to train; set train.do_train=false or adapter=lora")
    if not (train.do_train or train.do_eval):
        raise InputError("train.do_train=false and train.do_eval=false leave nothing to do")
    if train.eval_strategy is Strategy.steps and not train.eval_steps:
        raise InputError("train.eval_strategy=steps needs train.eval_steps")
    if train.load_best_model_at_end and (
        train.save_strategy is not train.eval_strategy or train.eval_strategy is Strategy.no
    ):
        raise InputError("train.load_best_model_at_end needs train.save_strategy and train.eval_strategy of one kind")
    if train.resume_from_checkpoint and not train.do_train:
        raise InputError(
            "train.resume_from_checkpoint goes on training; to evaluate a checkpoint give adapter.path=CHECKPOINT"
        )


def _check_ranges(cfg: LoraRecipe) -> None:
    positive = {
        "train": [
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
        ],
        "data": ["max_seq_length", "pad_to_multiple_of"],
        "adapter": ["r"],
        "runtime": ["loss_chunk"],
    }
    for group, names in positive.items():
        for name in names:
            if (value := getattr(getattr(cfg, group), name)) < 1:
                raise InputError(f"{group}.{name}={value}: takes 1 or more")
    if cfg.train.max_steps == 0 or (cfg.train.max_steps < 0 and cfg.train.num_train_epochs <= 0):
        raise InputError(
            "train.max_steps=0 or train.num_train_epochs=0 trains nothing; set train.do_train=false instead"
        )
    if cfg.samples < 0 or cfg.sample_tokens < 1:
        name, least = ("samples", 0) if cfg.samples < 0 else ("sample_tokens", 1)
        raise InputError(f"{name}={getattr(cfg, name)}: takes {least} or more")
    if not 0 <= cfg.data.validation_split_percentage < 100:
        raise InputError(
            f"data.validation_split_percentage={cfg.data.validation_split_percentage}: takes 0 to below 100 (percent)"
        )
    if not 0 <= cfg.adapter.lora_dropout < 1:
        raise InputError(f"adapter.lora_dropout={cfg.adapter.lora_dropout}: takes 0 to below 1")


def _check_runtime(runtime: RuntimeConfig) -> None:
    lazy_off = runtime.lazy is False or runtime.compile
    lazy_off = lazy_off or (runtime.lazy is None and runtime.device in (Device.cpu, Device.cuda))
    if runtime.compile and (runtime.lazy or runtime.device is Device.lazy):
        raise InputError("runtime.compile=true and lazy execution exclude each other; set runtime.lazy=false")
    if runtime.mark_step and lazy_off:
        raise InputError(
            "runtime.mark_step=true breaks lazy graphs, and runtime.lazy is false here; leave it null to follow lazy"
        )
    if runtime.layers_per_mark_step and lazy_off:
        raise InputError(
            f"runtime.layers_per_mark_step={runtime.layers_per_mark_step} breaks lazy graphs, and execution is not lazy"
            " here; leave it 0"
        )
    if runtime.cards is not None and runtime.cards < 1:
        raise InputError(f"runtime.cards={runtime.cards}: takes 1 or more, or null for any")
    for name in ("plan_lag", "plan_delay"):
        if getattr(runtime, name) < 0:
            raise InputError(f"runtime.{name}={getattr(runtime, name)}: takes 0 or more")
    for name in ("pipelining_fwd_bwd", "use_hpu_graphs_for_inference"):
        if getattr(runtime, name) and lazy_off:
            raise InputError(f"runtime.{name}=true exists in lazy mode only; set runtime.lazy=true or leave it out")
        if getattr(runtime, name) and runtime.device is Device.lazy:
            raise InputError(f"runtime.{name}=true is Gaudi's, torch's lazy engine has no such thing; leave it out")
    may_be_fused = runtime.attention is Attention.auto and runtime.device in (Device.hpu, Device.auto)
    for name in ("flash_attention_recompute", "flash_attention_fast_softmax"):
        if getattr(runtime, name) and not (runtime.attention is Attention.fused_sdpa or may_be_fused):
            raise InputError(f"runtime.{name}=true needs runtime.attention=fused_sdpa; set that, or leave it out")
    for name in ("use_fused_adam", "use_fused_clip_norm"):
        if getattr(runtime, name) and runtime.device not in (Device.hpu, Device.auto):
            raise InputError(f"runtime.{name}=true is Gaudi's; leave it out with runtime.device={runtime.device.name}")
    if "PT_HPU_LAZY_MODE" in runtime.environment:
        raise InputError("runtime.environment.PT_HPU_LAZY_MODE: lazy mode is said once, in runtime.lazy")


def _check_deepspeed(cfg: LoraRecipe) -> None:
    for key, instead in {
        "optimizer": "train.*",
        "scheduler": "train.lr_scheduler_type",
        "fp16": "model.dtype=bfloat16",
    }.items():
        if key in cfg.deepspeed:
            raise InputError(
                f"deepspeed.{key}: the trainer's optimizer and schedule are used; say it in {instead} instead"
            )
    stage = (cfg.deepspeed.get("zero_optimization") or {}).get("stage")
    if cfg.deepspeed and stage not in (0, 1, 2, 3):
        raise InputError(f"deepspeed.zero_optimization.stage={stage}: takes 0, 1, 2 or 3")
    if cfg.model.implementation is Implementation.stock and cfg.runtime.device is Device.lazy:
        raise InputError("model.implementation=stock does not run on torch's lazy engine (it asks for autocast there)")
    if cfg.model.implementation is Implementation.stock and cfg.data.batching is Batching.packed:
        raise InputError("model.implementation=stock lets packed records see each other; use data.batching=padded")
    if cfg.deepspeed and cfg.runtime.device is Device.lazy:
        raise InputError("deepspeed does not run on torch's lazy engine; use deepspeed=none with runtime=cpu_lazy")


def check_generation(cfg: GenerateRecipe) -> None:
    """As `check`, for generation."""
    _check_runtime(cfg.runtime)
    _check_deepspeed(cfg)
    options = cfg.generate
    if (cfg.model.name_or_path == "random") != bool(cfg.model.config):
        raise InputError("model.config belongs to model.name_or_path=random, and only to it")
    if cfg.model.implementation is Implementation.stock:
        raise InputError(
            "model.implementation=stock does not generate here (scripts/bench_generate.py compares with it)"
        )
    sources = [bool(options.prompt), options.file is not None, options.held_out]
    if sum(sources) > 1 or not (any(sources) or cfg.dry_run):
        raise InputError(
            "give one of generate.prompt=['A text'], generate.file=FILE and generate.held_out=true;"
            f" {'none' if not any(sources) else 'more than one'} is given"
        )
    _check_generation_ranges(options)
    stage = (cfg.deepspeed.get("zero_optimization") or {}).get("stage")
    if options.tensor_parallel > 1 and stage == 3:
        raise InputError("generate.tensor_parallel and ZeRO-3 both cut the weights; use deepspeed=none")
    if options.tensor_parallel > 1 and cfg.adapter.use_dora:
        raise InputError(
            "adapter.use_dora=true needs whole weights; merge the adapter, or use generate.tensor_parallel=1"
        )


def _check_generation_ranges(options: GenerateConfig) -> None:
    least = {"max_new_tokens": 1, "tensor_parallel": 1, "prefill_chunk": 0, "top_k": 0}
    maybe = {"length_bucket": 1, "stop_check": 1, "max_prompts": 1, "max_prompt_tokens": 1}
    for name, low in (least | maybe).items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            raise InputError(f"generate.{name}={value}: takes {low} or more")
    if options.temperature != 0 and not 1e-3 <= options.temperature <= 1e3:
        raise InputError(
            f"generate.temperature={options.temperature}: takes 0.001 to 1000, or 0 for the likeliest token"
        )
    if not 0 < options.top_p <= 1:
        raise InputError(f"generate.top_p={options.top_p}: takes above 0 to 1")
    if not 1e-3 <= options.repetition_penalty <= 1e3:
        raise InputError(
            f"generate.repetition_penalty={options.repetition_penalty}: takes 0.001 to 1000; 1 changes nothing"
        )
    if options.batch_size != "auto" and (not isinstance(options.batch_size, int) or options.batch_size < 1):
        raise InputError(f"generate.batch_size={options.batch_size}: takes 1 or more rows, or auto")
    if "" in options.stop:
        raise InputError("generate.stop holds an empty text, which ends everything at once; leave it out")
