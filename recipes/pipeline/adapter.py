"""LoRA through PEFT: added, counted, loaded with checks, and saved so that stock PEFT loads it, at every ZeRO stage."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling.decoding import LowRank, plain
from recipes.pipeline.config import AdapterConfig, AdapterKind, Dtype, InputError, LoraRecipe

if TYPE_CHECKING:
    from recipes.pipeline.tensor_parallel import Shares

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NAME = "default"
MARKED = "model.layers.0.self_attn.q_proj.weight"  # of its first row: fine-tunes of one model differ in it


def add_adapter(model: PreTrainedModel, cfg: LoraRecipe) -> nn.Module:
    """The model with the adapter that cfg asks for: a new one, a finished one from adapter.path, or none."""
    if cfg.adapter.kind is AdapterKind.none:
        if cfg.adapter.path:
            raise InputError(f"adapter=none and adapter.path={cfg.adapter.path} contradict each other")
        return model.requires_grad_(False) if not cfg.train.do_train else model
    torch.manual_seed(cfg.seed)  # equal on every rank
    mark = base_mark(model)
    if cfg.adapter.path:
        wrapped = load_adapter(model, adapter_folder(cfg.adapter.path), trainable=cfg.train.do_train)
    elif cfg.train.do_train:
        wrapped = get_peft_model(model, lora_config(cfg.adapter, model))
    else:
        return model.requires_grad_(False)  # evaluation of the base model
    wrapped.base_mark = mark
    if cfg.adapter.dtype is not None:
        dtype = torch.bfloat16 if cfg.adapter.dtype is Dtype.bfloat16 else torch.float32
        for name, parameter in wrapped.named_parameters():
            if _belongs(name, parameter):
                parameter.data = parameter.data.to(dtype)
    return wrapped


def lora_config(adapter: AdapterConfig, model: nn.Module) -> LoraConfig:
    """PEFT's configuration; raises InputError for a name that matches no module (PEFT passes over it in silence)."""
    everything = adapter.target_modules == ["all-linear"]
    linear = _linear_names(model)
    if not everything:
        check_names("adapter.target_modules", adapter.target_modules, linear)
    check_names("adapter.modules_to_save", adapter.modules_to_save, [name for name, _ in model.named_modules() if name])
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, field):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in linear):
                raise InputError(f"adapter.{field}: {pattern!r} matches no linear module{_nearest(pattern, linear)}")
    return LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules="all-linear" if everything else list(adapter.target_modules),
        modules_to_save=list(adapter.modules_to_save) or None,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=dict(adapter.alpha_pattern),
        bias=adapter.bias.name,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        task_type="CAUSAL_LM",
    )


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def check_names(option: str, wanted: Iterable[str], names: list[str]) -> None:
    """Raises InputError for the first of `wanted` that is the end of no module's name."""
    for name in wanted:
        if not any(full == name or full.endswith(f".{name}") for full in names):
            raise InputError(f"{option}: {name!r} matches no module{_nearest(name, names)}")


def _nearest(name: str, names: list[str]) -> str:
    ends = sorted({full.rpartition(".")[2] for full in names} - {""})
    near = difflib.get_close_matches(name, ends, n=2)
    listed = [end for end in ends if not end.isdigit()][:12]
    return f"; did you mean {' or '.join(near)}?" if near else f"; there is {', '.join(listed)}"


# Counting


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # a parameter that ZeRO-3 has cut is empty here


def trainable_counts(model: nn.Module) -> tuple[int, int]:
    """(trained, all) parameters of the whole model, over all ranks."""
    counts = [(_numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


def describe_model(model: nn.Module) -> str:
    """What is trained on what, in one or two lines."""
    trained, total = trainable_counts(model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for n, p in base.named_parameters() if "lora_" not in n})
    line = f"model         {type(base).__module__}.{type(base).__name__}, {total:,} parameters, {', '.join(dtypes)}"
    if not isinstance(model, PeftModel):
        return line + "; no adapter"
    config = model.peft_config[NAME]
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    kind = "DoRA" if config.use_dora else "LoRA"
    dtype = next(str(p.dtype).removeprefix("torch.") for n, p in model.named_parameters() if "lora_" in n)
    text = f"adapter       {kind} r={config.r} on {', '.join(sorted(adapted))}, {dtype}: "
    text += (
        f"trains {trained:,} of {total:,} parameters ({100 * trained / total:.2f} %)"
        if trained
        else "applied, not trained"
    )
    origin = getattr(model, "adapter_origin", None)
    return f"{line}\n{text}" + (f"; weights from {origin}" if origin else "")


# Saving


def _belongs(name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad or "lora_" in name or "modules_to_save" in name


@contextmanager
def _whole(parameter: nn.Parameter, write: bool = False) -> Iterator[None]:
    """Inside, a parameter that ZeRO-3 has cut is whole; with `write` rank 0's changes are handed to all."""
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if write else None):
        yield


def _is_main() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def save_adapter(model: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write adapter_model.safetensors and adapter_config.json, each whole or not at all. Collective.

    Only the adapter's parameters are gathered, never the base model's. Raises RuntimeError rather than leave an empty file.
    """
    gathered = {}
    for name, parameter in model.named_parameters():
        if _belongs(name, parameter):
            with _whole(parameter):
                if _is_main():
                    gathered[name] = parameter.detach().cpu().clone().contiguous()
    if not _is_main():
        return
    tensors = get_peft_model_state_dict(model, state_dict=gathered, adapter_name=NAME, save_embedding_layers=False)
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty or not tensors:
        raise RuntimeError(
            f"the adapter would be saved empty ({len(empty)} of {len(tensors)} tensors); nothing was written"
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.peft_config[NAME])
    config.inference_mode = True
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
        mark = getattr(model, "base_mark", None)
        save_file(tensors, Path(part) / WEIGHTS_FILE, {"format": "pt", **({"base_mark": mark} if mark else {})})
        config.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        for file in sorted(Path(part).iterdir()):
            os.replace(file, folder / file.name)


# Reading


def plain_lora(module: nn.Module) -> tuple[nn.Module, LowRank | None] | None:
    """The linear module below PEFT's wrapper and its LoRA matrices; None where more than one plain LoRA is at work."""
    if not isinstance(module, LoraLinear):
        return plain(module)
    if module.disable_adapters:
        return plain(module.base_layer)
    unusual = module.merged or module.lora_variant or module.lora_bias.get(NAME) or module.lora_embedding_A
    found = plain(module.base_layer)
    if unusual or module.active_adapters != [NAME] or found is None:
        return None
    down, up = module.lora_A[NAME].weight.data, module.lora_B[NAME].weight.data
    return found[0], LowRank(down, up, module.scaling[NAME])


# Loading


def load_adapter(model: PreTrainedModel, folder: Path, trainable: bool) -> PeftModel:
    """A finished adapter on `model`, every key and shape checked (PEFT only warns). Raises InputError."""
    mark = base_mark(model)
    wrapped, ours = fit_adapter(model, folder, trainable)
    compare_bases(folder, model.name_or_path, mark)
    shares = _shares(model)
    with _open_weights(folder) as file:
        for key, parameter in ours.items():
            with torch.no_grad(), _whole(parameter, write=True):
                if parameter.numel():
                    whole = file.get_tensor(key)
                    parameter.data.copy_(shares.part(key, whole) if shares else whole)
    if not trainable:
        wrapped.requires_grad_(False)
    wrapped.adapter_origin = str(folder)
    return wrapped


def fit_adapter(
    model: PreTrainedModel, folder: Path, trainable: bool = False
) -> tuple[PeftModel, dict[str, nn.Parameter]]:
    """`model` with room for the adapter in `folder`, and its parameters by their keys in the file. Raises InputError.

    No weight is read: the model may be on the meta device.
    """
    config = read_adapter_config(folder)
    config.inference_mode = not trainable
    if isinstance(config.target_modules, set | list):
        try:
            check_names("target_modules", sorted(config.target_modules), [*_linear_names(model), *_embeddings(model)])
        except InputError as error:
            raise InputError(f"adapter.path={folder} is of another base model: {error}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*base_model_name_or_path.*")  # said by ourselves
        wrapped = get_peft_model(model, config)
    shares = _shares(model)
    with _open_weights(folder) as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    ours = _keys(wrapped, False)
    if set(found) - set(ours) and set(found) == set(with_base := _keys(wrapped, True)):
        ours = with_base  # PEFT saves the base's embedding too where it is a target
    _check_keys(folder, found, ours, shares.whole_shape if shares else lambda _, shape: shape)
    return wrapped, ours


def _shares(model: nn.Module) -> Shares | None:
    """What cuts whole tensors, where a rank has a part of some matrices; one rank holds any adapter whole."""
    shares = getattr(model, "shares", None)
    return shares if shares is not None and shares.ranks > 1 else None


def _keys(wrapped: PeftModel, embeddings: bool) -> dict[str, nn.Parameter]:
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))  # a tied head has a key of its own
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save_embedding_layers.*")
        return get_peft_model_state_dict(
            wrapped, state_dict=parameters, adapter_name=NAME, save_embedding_layers=embeddings
        )


def _embeddings(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]


def base_mark(model: nn.Module) -> str | None:
    """Tells models of one shape apart, whatever their names and dtypes; adapters carry their base's. Collective.

    None where the weights are not there (the meta device) or not a Llama's.
    """
    parameter = dict(model.named_parameters()).get(MARKED)
    if parameter is None or parameter.is_meta:
        return None
    with _whole(parameter):
        return mark_of(parameter.detach()[0]) if parameter.numel() else None


def mark_of(row: torch.Tensor) -> str:
    """The mark of a model whose tensor MARKED begins with `row`."""
    # Rounded: a model in float32 and in bfloat16 is one model
    return hashlib.sha256(row.cpu().bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def compare_bases(folder: Path, name: str | None, mark: str | None) -> None:
    """A line on stderr where the adapter's base had other weights than the model `name`; without marks, another name."""
    if not _is_main():
        return
    trained_on = Path(read_adapter_config(folder).base_model_name_or_path or "").name
    given = Path(name or "").name  # by the last part of the path: models are moved and copied
    with _open_weights(folder) as file:
        theirs = (file.metadata() or {}).get("base_mark")
    if theirs and mark:
        if theirs != mark:
            print(
                f"warning: adapter {folder} was trained on other weights than those here"
                f" (there {trained_on or 'a model without a name'}, here {given or 'a model without a name'}); its answers will be off",
                file=sys.stderr,
            )
    elif trained_on and given and trained_on != given:
        print(f"warning: adapter {folder} was trained on {trained_on}, the model here is {given}", file=sys.stderr)


def adapter_folder(path: str | Path) -> Path:
    """The adapter's folder; of a run's folder, the adapter that the run has left."""
    folder = Path(path).expanduser()
    inside = folder / "adapter"
    return inside if not (folder / CONFIG_FILE).is_file() and (inside / CONFIG_FILE).is_file() else folder


def read_adapter_config(folder: Path) -> PeftConfig:
    """adapter_config.json of `folder`. Raises InputError if there is none, or none of LoRA."""
    if not folder.is_dir():
        raise InputError(f"adapter.path={folder}: no such folder")
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(f"adapter.path={folder}: no {CONFIG_FILE} in it")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise InputError(f"{folder / CONFIG_FILE}: cannot be read ({str(error).splitlines()[0][:120]})") from error
    if config.peft_type != "LORA":
        raise InputError(f"{folder / CONFIG_FILE}: peft_type {config.peft_type}; this project runs LORA")
    return config


@contextmanager
def _open_weights(folder: Path) -> Iterator[safe_open]:
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise InputError(f"adapter.path={folder}: no {WEIGHTS_FILE} in it")
    try:
        opened = safe_open(str(file), framework="pt")
    except Exception as error:  # safetensors has an error class of its own
        raise InputError(f"{file}: damaged or cut short ({str(error)[:80]})") from error
    with opened as stream:
        if not list(stream.keys()):
            raise InputError(f"{file}: holds no tensors (a save under ZeRO-3 that gathered nothing); train again")
        yield stream


def _check_keys(
    folder: Path,
    found: dict[str, tuple[int, ...]],
    ours: dict[str, nn.Parameter],
    whole_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]],
) -> None:
    missing, unknown = sorted(set(ours) - set(found)), sorted(set(found) - set(ours))
    if missing or unknown:
        first = f"missing {missing[0]}" if missing else f"unknown {unknown[0]}"
        raise InputError(
            f"{folder / WEIGHTS_FILE} does not fit this model: {len(missing)} keys missing, {len(unknown)} unknown; first: {first}"
        )
    for key, parameter in ours.items():
        wanted = whole_shape(key, tuple(getattr(parameter, "ds_shape", parameter.shape)))
        if found[key] != wanted:
            raise InputError(
                f"{folder / WEIGHTS_FILE} is of another base model: {key} is {found[key]}, the model needs {wanted}"
            )
