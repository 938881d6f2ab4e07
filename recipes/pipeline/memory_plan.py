"""A configuration -> the plan of its memory on one card, by modeling/memory.py. Loads no weights and needs no card."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.pipeline.config import (
    Attention,
    Batching,
    Dtype,
    GenerateRecipe,
    Implementation,
    InputError,
    LoraRecipe,
    RuntimeConfig,
)
from recipes.pipeline.preflight import shape_of
from recipes.pipeline.runtime import GIB, Runtime, cards, environment, hpu_cards, hpu_installed, lazy_mode

if TYPE_CHECKING:
    from torch import nn

    from modeling.memory import Plan, Setting
    from modeling.rehearsal import Build, Cut, Fuse, Workload

# GiB that software can use: Gaudi2's was read on a card; Gaudi3's is its 128 GB by the same share; CUDA's as torch reports them
CARDS = {"Gaudi2": 94.62, "Gaudi3": 126.2, "H100": 79.1, "H200": 139.8}
KIND_CARDS = {"hpu": "Gaudi2", "cuda": "H100"}
HERE = "this machine"
QUICK = (2, 3)  # layers traced where many plans are wanted


@dataclass(frozen=True)
class Request:
    """All that a plan is made of."""

    build: Build
    workloads: dict[str, Workload]  # the steps of a run, by name
    setting: Setting
    layers: int
    fuse: Fuse | None


def plans(cfg: LoraRecipe, only: str | None = None, depths: tuple[int, int] | None = None) -> dict[str, Plan]:
    """A plan of each kind of step of the run (or of one), the one that needs most first. Raises InputError for what cannot be
    built."""
    from modeling.memory import DEPTHS, plan

    try:
        wanted = request(cfg)
        found = {
            name: plan(wanted.build, workload, wanted.setting, wanted.layers, wanted.fuse, depths or DEPTHS)
            for name, workload in wanted.workloads.items()
            if only in (None, name)
        }
    except InputError:
        raise
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:  # shapes that no model can have
        raise InputError(
            f"no plan of this model (model.config, model.shape): {' '.join(str(error).split())}"
        ) from error
    return dict(sorted(found.items(), key=lambda item: -item[1].nominal))


def main_plan(cfg: LoraRecipe, only: str | None = None) -> Plan:
    """The plan of the step that needs most, or of one kind of step, from as few layers as give the peak."""
    return next(iter(plans(cfg, only, QUICK).values()))


def request(cfg: LoraRecipe) -> Request:
    """What is to be planned for `cfg`, on the kind of device that it asks for."""
    from modeling.memory import Setting

    config = shape_of(cfg)
    if config is None:
        raise InputError(
            f"model.name_or_path={cfg.model.name_or_path} is not on this machine and model.shape is empty;"
            " give its sizes in model.shape"
        )
    kind = device_kind(cfg)
    runtime = Runtime(kind, lazy_mode(cfg.runtime, kind))
    graphs = runtime.lazy or cfg.runtime.compile or kind == "hpu"  # shapes that never change
    generating = isinstance(cfg, GenerateRecipe)
    ranks = cfg.runtime.cards or int(os.environ.get("WORLD_SIZE", "1"))
    variables = environment(cfg, kind, runtime.lazy) if kind == "hpu" else cfg.runtime.environment
    name = "PT_HPU_MAX_COMPOUND_OP_SIZE"
    size = variables.get(name, os.environ.get(name) if kind == "hpu" else None)
    if size is not None and not str(size).isdigit():
        raise InputError(f"runtime.environment.{name}={size}: takes a whole number")
    zero = (cfg.deepspeed.get("zero_optimization") or {}) if cfg.deepspeed else {}
    stage = zero.get("stage") if cfg.deepspeed and (cfg.train.do_train or zero.get("stage") == 3) else None
    setting = Setting(
        device=kind, lazy=runtime.lazy, ranks=ranks, zero_stage=stage, zero3=_zero3(zero),
        shared=cfg.generate.tensor_parallel if generating else 1,
        offload_optimizer=offloaded(zero, "offload_optimizer"), offload_weights=offloaded(zero, "offload_param"),
        pipelined=cfg.runtime.pipelining_fwd_bwd, compound=int(size) if size else None,
        lazy_collectives=variables.get("PT_HPU_ENABLE_LAZY_COLLECTIVES") == "true",
        lag=cfg.runtime.plan_lag, delay=cfg.runtime.plan_delay, softmax=_softmax(cfg.runtime),
    )  # fmt: skip
    workloads = _generation(cfg, graphs) if generating else _training(cfg, kind, graphs)
    longest = max(max(workload.length, workload.keys) for workload in workloads.values())
    if longest > config.max_position_embeddings:
        named = "generate.max_prompt_tokens and max_new_tokens make" if generating else "data.max_seq_length is"
        raise InputError(
            f"{named} {longest}, above the model's max_position_embeddings {config.max_position_embeddings}"
        )
    return Request(_builder(cfg, runtime), workloads, setting, config.num_hidden_layers, _fuse(cfg, graphs))


def _softmax(runtime: RuntimeConfig) -> str:
    if runtime.attention is not Attention.eager:
        return "inside attention's kernel"
    return f"eager attention's, in {'bfloat16' if runtime.attn_softmax_bf16 else 'float32'}"


def device_kind(cfg: LoraRecipe) -> str:
    """The device of the configuration; for auto this machine's."""
    if cfg.runtime.device.name != "auto":
        return cfg.runtime.device.name
    return "hpu" if hpu_installed() and hpu_cards() else "cuda" if cards("cuda") else "cpu"


def _zero3(zero: dict) -> object:
    from modeling.lazy_memory import Zero3

    names = {
        "persistence": "stage3_param_persistence_threshold", "reuse": "stage3_max_reuse_distance",
        "prefetch": "stage3_prefetch_bucket_size", "live": "stage3_max_live_parameters",
    }  # fmt: skip
    said = {}
    for field, name in names.items():
        if (value := zero.get(name)) not in (None, "auto"):
            try:
                said[field] = int(float(value))
            except (TypeError, ValueError) as error:
                raise InputError(f"deepspeed.zero_optimization.{name}={value}: takes a number or auto") from error
    leaves = tuple((zero.get("leaf_module") or {}).get("classes", ()))
    return Zero3(**said, leaves=leaves)


def offloaded(zero: dict, part: str) -> bool:
    return (zero.get(part) or {}).get("device") in ("cpu", "nvme")


def _training(cfg: LoraRecipe, kind: str, graphs: bool) -> dict[str, Workload]:
    from modeling.rehearsal import Workload

    train, length = cfg.train, cfg.data.max_seq_length
    masked = graphs or cfg.data.batching is Batching.padded  # graphs cannot look whether a mask hides anything
    same = {"length": length, "masked": masked, "packed": cfg.data.batching is Batching.packed}
    found = {}
    if train.do_train:
        accumulated = train.gradient_accumulation_steps > 1 and not cfg.deepspeed
        found["training"] = Workload(
            "training", train.per_device_train_batch_size, **same, accumulated=accumulated, clip=train.max_grad_norm > 0,
            optimizer=not cfg.deepspeed,
        )  # fmt: skip
    if train.do_eval:
        found["evaluation"] = Workload("evaluation", train.per_device_eval_batch_size, **same)
    if not found:
        raise InputError("train.do_train=false and train.do_eval=false leave nothing to plan")
    return found


def _generation(cfg: GenerateRecipe, graphs: bool) -> dict[str, Workload]:
    from modeling.rehearsal import Workload
    from recipes.pipeline.generation_plan import longest_prompt

    options = cfg.generate
    rows = 1 if options.batch_size == "auto" else int(options.batch_size)
    prompt = longest_prompt(cfg, graphs)
    same = {"rows": rows, "keys": prompt + options.max_new_tokens, "masked": True, "whole": graphs}
    return {
        "prompt": Workload("prompt", length=prompt, chunk=options.prefill_chunk, **same),
        "decoding": Workload("decoding", length=prompt + options.max_new_tokens, **same),
    }


def _builder(cfg: LoraRecipe, runtime: Runtime) -> Build:
    def build(layers: int, cut: Cut) -> nn.Module:
        import torch

        from modeling.execution import bind
        from recipes.pipeline.model import DTYPES, build_execution

        config = shape_of(cfg)
        config.num_hidden_layers, config.use_cache = layers, False
        model = _base(cfg, config, cut).to(DTYPES[cfg.model.dtype])
        if cfg.model.implementation is Implementation.vendored:
            bind(model, build_execution(cfg.runtime, runtime, lambda: cut("mark_step")))
        else:
            model.set_attn_implementation("eager" if cfg.runtime.attention is Attention.eager else "sdpa")
        model.config.use_cache = False
        if cfg.train.gradient_checkpointing and cfg.train.do_train:
            reentrant = cfg.train.gradient_checkpointing_use_reentrant
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        if cfg.adapter.path:
            model = _with_finished_adapter(model, cfg)
        elif not isinstance(cfg, GenerateRecipe):
            from recipes.pipeline.adapter import add_adapter

            model = add_adapter(model, cfg)
        if isinstance(cfg, GenerateRecipe) or not cfg.train.do_train:
            model.requires_grad_(False)
        if cfg.deepspeed and cfg.model.dtype is Dtype.bfloat16:  # DeepSpeed casts the whole module
            model.to(torch.bfloat16)
        if isinstance(cfg, GenerateRecipe) and cfg.generate.tensor_parallel > 1:
            from recipes.pipeline.tensor_parallel import connect

            connect(model, model.get_base_model().shares if hasattr(model, "get_base_model") else model.shares)
        return model

    return build


def _base(cfg: LoraRecipe, config: object, cut: Cut) -> nn.Module:
    from recipes.pipeline.model import _model_class
    from recipes.pipeline.tensor_parallel import HeadShard, TableShard, narrowed

    ranks = cfg.generate.tensor_parallel if isinstance(cfg, GenerateRecipe) else 1
    if ranks == 1:
        return _model_class(cfg.model)(config)
    model = _model_class(cfg.model)(narrowed(config, ranks))
    model.shares = _shares(ranks, cut)
    model.model.embed_tokens, model.lm_head = TableShard(config, model.shares), HeadShard(config, model.shares)
    return model


def _shares(ranks: int, cut: Cut) -> object:
    import torch

    from recipes.pipeline.tensor_parallel import Shares

    class Planned(Shares):
        """The collectives' memory without other ranks."""

        def sum(self, tensor: torch.Tensor) -> torch.Tensor:
            cut("collective")
            return tensor

        def join(self, tensor: torch.Tensor) -> torch.Tensor:
            cut("collective")
            return torch.cat([torch.empty_like(tensor) for _ in range(self.ranks)], dim=-1)

    return Planned(0, ranks)


def _with_finished_adapter(model: nn.Module, cfg: LoraRecipe) -> nn.Module:
    from peft import get_peft_model

    from recipes.pipeline.adapter import adapter_folder, lora_config, read_adapter_config

    folder = adapter_folder(
        cfg.adapter.path
    )  # a plan may come before the adapter: then with what the configuration says
    config = read_adapter_config(folder) if folder.is_dir() else lora_config(cfg.adapter, model)
    config.inference_mode = not cfg.train.do_train
    return get_peft_model(model, config)


def _fuse(cfg: LoraRecipe, graphs: bool) -> Fuse | None:
    if not isinstance(cfg, GenerateRecipe) or graphs or not cfg.generate.fused or cfg.generate.tensor_parallel > 1:
        return None

    def fuse(model: nn.Module, length: int) -> object:
        from modeling.decoding import FusedDecoder, can_fuse
        from recipes.pipeline.adapter import plain_lora

        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        return FusedDecoder(inner, length, plain_lora) if can_fuse(inner, plain_lora) else None

    return fuse


# Cards


def capacities() -> dict[str, float]:
    """Bytes by card; this machine's are its first CUDA card's or, without one, its memory."""
    import psutil
    import torch

    found = {name: size * GIB for name, size in CARDS.items()}
    if torch.cuda.is_available():
        found[HERE] = torch.cuda.get_device_properties(0).total_memory
    else:
        found[HERE] = psutil.virtual_memory().total
    return found


def capacity(name: str) -> float:
    """Bytes of a card. Raises InputError for one that is not known."""
    known = capacities()
    for card, size in known.items():
        if card.lower() == name.lower():
            return size
    raise InputError(f"card {name}: not known; there is {', '.join(known)}")


# Text


def warn(cfg: LoraRecipe, runtime: Runtime) -> None:
    """One line on stderr where a run is not going to fit its device. Rank 0 only; what cannot be planned is passed over."""
    import torch

    if not runtime.is_main:
        return
    card = KIND_CARDS.get(runtime.kind, HERE)
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if card == HERE and runtime.kind != "cuda" else 1
    with contextlib.suppress(InputError), torch.random.fork_rng(devices=[]):
        made, room = main_plan(cfg), capacity(card) / shared
        if made.verdict(room) == "does not fit":
            print(
                f"warning       {made.workload.kind} is planned to need {made.low / GIB:.1f} GiB or more, of {card}'s"
                f" {room / GIB:.1f}; what would change that: python scripts/plan.py, with the same arguments",
                file=sys.stderr,
            )


def lines(cfg: LoraRecipe, card: str | None = None) -> list[str]:
    """The plan for dry_run and preflight: terms, peak, verdict, in the form of preflight's plan."""
    name, made = next(iter(plans(cfg).items()))
    shown = {"weights": 0} | made.static | made.peak
    text = [
        f"memory        {made.nominal / GIB:.2f} GiB a card in {name}"
        + (
            f" ({made.low / GIB:.1f} to {made.high / GIB:.1f}, by how a lazy graph reuses memory):"
            if made.high > made.low
            else ":"
        )
    ]
    held = made.nominal - made.eager
    if held:
        shown["lazy graphs"] = held
    text += [f"              {size / GIB:8.2f} GiB  {term}" for term, size in shown.items() if size >= GIB / 200]
    card = card or KIND_CARDS.get(device_kind(cfg), HERE)
    room = capacity(card)
    text.append(f"              {made.verdict(room)} on {card} ({room / GIB:.1f} GiB); the peak: {made.where}")
    text.append("              more: python scripts/plan.py, with the same arguments")
    return text
