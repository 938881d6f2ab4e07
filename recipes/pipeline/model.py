"""Weights -> Llama -> execution -> LoRA. The order is the point of this file: execution is bound before PEFT wraps modules,
and adapters come last, so that ZeRO-3 has already cut the frozen weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_utils import no_init_weights

from modeling.attention import FusedOptions
from modeling.execution import Execution, bind, mark_step_for
from modeling.llama import LlamaForCausalLM
from recipes.pipeline.config import (
    Attention,
    Dtype,
    GenerateRecipe,
    Implementation,
    InputError,
    LoraRecipe,
    ModelConfig,
    Ops,
    RuntimeConfig,
)
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.tensor_parallel import Shares, copy_into, empty_model, read_into
from recipes.pipeline.tokenizer import check_vocabulary, load_tokenizer
from recipes.pipeline.weights import check_folder, local_folder, locate, one_line, stream_into, weight_files

DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def build_model(cfg: LoraRecipe, tokenizer: PreTrainedTokenizerBase, runtime: Runtime) -> torch.nn.Module:
    """The model of `cfg`, with its adapter if it has one. Raises InputError for what cannot be loaded."""
    from recipes.pipeline.adapter import add_adapter  # here: a plan of generation has no need of PEFT

    model = load_weights(cfg, tokenizer, shares_of(cfg, runtime))
    if not isinstance(cfg, GenerateRecipe):  # there the prompts are checked, one by one
        check_lengths(cfg, model.config)
    if cfg.model.implementation is Implementation.vendored:
        bind(model, build_execution(cfg.runtime, runtime))
    else:
        model.set_attn_implementation("eager" if cfg.runtime.attention is Attention.eager else "sdpa")
    model.config.use_cache = False  # nothing is generated while training or evaluating
    if runtime.kind == "lazy":  # moving there makes new parameters, and unties a tied head
        model.to(runtime.device)
        model.tie_weights()
    if cfg.train.gradient_checkpointing and cfg.train.gradient_checkpointing_use_reentrant:
        model.enable_input_require_grads()  # a re-entrant checkpoint needs an input that asks for gradients
    return add_adapter(model, cfg)


def build_execution(options: RuntimeConfig, runtime: Runtime, mark_step: Callable[[], None] | None = None) -> Execution:
    """Modes and kernels of this run: what is null or auto in conf follows the device. mark_step: in the device's place."""
    on_card = runtime.kind == "hpu"
    attention, ops = options.attention, options.ops
    if attention is Attention.auto:
        attention = Attention.fused_sdpa if on_card else Attention.sdpa
    if ops is Ops.auto:
        ops = Ops.hpu if on_card else Ops.eager
    if not on_card and (attention is Attention.fused_sdpa or ops is Ops.hpu):
        raise InputError(
            f"runtime.attention=fused_sdpa and runtime.ops=hpu are Gaudi's kernels, the device is {runtime.kind};"
            " leave both auto"
        )
    wanted = runtime.lazy if options.mark_step is None else options.mark_step
    return Execution(
        mark_step=(mark_step or mark_step_for(runtime.kind, runtime.lazy)) if wanted and runtime.lazy else None,
        in_place_residual=options.in_place_residual,
        layers_per_mark_step=options.layers_per_mark_step,
        attention=attention.name,
        ops=ops.name,
        loss_chunk=options.loss_chunk,
        softmax_bf16=options.attn_softmax_bf16,
        fused=FusedOptions(options.flash_attention_recompute, options.flash_attention_fast_softmax),
    )


def shares_of(cfg: LoraRecipe, runtime: Runtime) -> Shares | None:
    """This rank's place under tensor parallelism, if there is any. Collective."""
    ranks = cfg.generate.tensor_parallel if isinstance(cfg, GenerateRecipe) else 1
    return Shares.of(runtime.rank, runtime.world_size, ranks) if ranks > 1 else None


def load_weights(cfg: LoraRecipe, tokenizer: PreTrainedTokenizerBase, shares: Shares | None = None) -> PreTrainedModel:
    """The Llama of cfg.model in its dtype, on the CPU (under ZeRO-3: cut over the ranks while it is read; with `shares`: a part)."""
    model_class = _model_class(cfg.model)
    if cfg.model.name_or_path == "random":
        config = _config_of(cfg.model.config, tokenizer)
        torch.manual_seed(cfg.seed)
        whole = _built(lambda: model_class(config).to(DTYPES[cfg.model.dtype]))
        if shares is None:
            return whole
        model = empty_model(config, DTYPES[cfg.model.dtype], shares)
        copy_into(model, whole)
        return model
    source = locate(cfg.model.name_or_path, cfg.model)
    config = read_config(source, cfg.model)
    check_vocabulary(tokenizer, config.vocab_size)
    if is_deepspeed_zero3_enabled():
        return _streamed(cfg, model_class, config, source, tokenizer)
    if isinstance(cfg, GenerateRecipe):
        return _read(cfg, config, source, tokenizer, shares or Shares(0, 1))
    options = {
        "config": config,
        "torch_dtype": DTYPES[cfg.model.dtype],
        "revision": cfg.model.revision,
        "use_safetensors": True,
    }
    try:
        model, info = _built(lambda: model_class.from_pretrained(source, **options, output_loading_info=True))
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"model.name_or_path={cfg.model.name_or_path}: cannot be loaded ({one_line(error)})"
        ) from error
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
        raise InputError(
            f"{source}: {len(wrong)} weights are missing or of another shape, first {wrong[0]}; copy the model again"
        )
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _streamed(
    cfg: LoraRecipe,
    model_class: type[PreTrainedModel],
    config: LlamaConfig,
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
) -> PreTrainedModel:
    # transformers' own loader keeps whole files in every rank's memory under ZeRO-3
    folder = local_folder(source, cfg.model)
    check_folder(folder)
    with no_init_weights():
        model = _built(lambda: model_class._from_config(config, torch_dtype=DTYPES[cfg.model.dtype]))
    model.tie_weights()  # a tied head has no weight of its own in the file
    stream_into(model, folder)
    return _configured(model, folder, tokenizer)


def _read(
    cfg: LoraRecipe, config: LlamaConfig, source: Any, tokenizer: PreTrainedTokenizerBase, shares: Shares
) -> PreTrainedModel:
    # Not mapped from the file, as transformers does: decoding stores weights anew, and mapped pages would stay beside them
    folder = local_folder(source, cfg.model)
    check_folder(folder)
    model = _built(lambda: empty_model(config, DTYPES[cfg.model.dtype], shares))
    read_into(model, weight_files(folder))
    return _configured(model, folder, tokenizer)


def _configured(model: PreTrainedModel, folder: Any, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    with contextlib.suppress(OSError):  # a model may have no generation configuration
        # Its class, not the library's: optimum-habana gives models one with attributes that its trainer asks for
        model.generation_config = type(model.generation_config).from_pretrained(folder)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.name_or_path = str(folder)
    return model


def _model_class(model: ModelConfig) -> type[PreTrainedModel]:
    if model.implementation is Implementation.vendored:
        return LlamaForCausalLM
    from transformers import LlamaForCausalLM as StockLlama

    return StockLlama


def _built(build: Any) -> Any:
    try:
        return build()
    except ValueError as error:
        raise InputError(f"model: {one_line(error)}") from error


def _config_of(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    unknown = sorted(set(fields) - set(LlamaConfig().to_dict()) - {"head_dim", "rope_scaling"})
    if unknown:
        raise InputError(f"model.config.{unknown[0]}: LlamaConfig has no such field")
    config = _built(lambda: LlamaConfig(**{**special, **fields}))
    check_vocabulary(tokenizer, config.vocab_size)
    return config


def read_config(source: Any, model: ModelConfig) -> LlamaConfig:
    """The configuration in a folder or of a hub id. Raises InputError where it is no Llama's."""
    try:
        config = LlamaConfig.from_pretrained(source, revision=model.revision)
    except (OSError, KeyError) as error:
        raise InputError(
            f"model.name_or_path={model.name_or_path}: neither a folder here nor to be had from the hub ({one_line(error)})"
        ) from error
    except ValueError as error:
        raise InputError(f"{source}: {one_line(error)}") from error
    if config.model_type != "llama":
        raise InputError(f"{source} is a {config.model_type} model; this project runs the Llama architecture")
    return config


def check_lengths(cfg: LoraRecipe, config: LlamaConfig) -> None:
    """Raises InputError if rows are longer than the model was made for."""
    if cfg.data.max_seq_length > config.max_position_embeddings:
        raise InputError(
            f"data.max_seq_length={cfg.data.max_seq_length} is above the model's max_position_embeddings"
            f" {config.max_position_embeddings}; lower it"
        )


__all__ = ["build_model", "load_tokenizer"]
