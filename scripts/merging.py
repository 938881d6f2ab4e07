"""A base model's weights with adapters merged in, some rows at a time, and the safetensors files they are written to.

The arithmetic is PEFT's: each tensor's adapted module stands on the meta device, is filled with a block of rows of its own
weights, and merges itself in float32. Several adapters: base + sum of weight * (merged by that one alone - base).
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from peft.tuners.lora import Embedding, LoraLayer
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pipeline.adapter import NAME, WEIGHTS_FILE, fit_adapter, read_adapter_config
from recipes.pipeline.config import InputError
from recipes.pipeline.weights import DTYPES, INDEX, one_line, tensor_entries

BLOCK = 1024**2  # numbers that are merged at one time: memory does not depend on a tensor's size
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}
# Initialisations that take something out of the base model's weights
CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga", "mica")


class Tensors:
    """Tensors of safetensors files, read by rows. Read, not mapped: mapped pages count as a process's memory."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.streams: dict[Path, BinaryIO] = {file: file.open("rb") for file in files}
        self.entries = {name: (file, entry) for file in files for name, entry in tensor_entries(file).items()}
        for name, (file, entry) in self.entries.items():
            if entry["dtype"] not in DTYPES:
                raise InputError(
                    f"{file}: {name} is stored as {entry['dtype']}, a quantised model's; merge into one of F32, F16 or BF16"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name][1]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, DTYPES[self.entries[name][1]["dtype"]])

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) as they are stored."""
        file, entry = self.entries[name]
        dtype, (count, *rest) = self.dtype(name), self.shape(name)
        stop = count if stop is None else stop
        size = dtype.itemsize * torch.Size(rest).numel()
        data = bytearray((stop - start) * size)
        self.streams[file].seek(entry["begin"] + start * size)
        self.streams[file].readinto(data)
        return torch.frombuffer(data, dtype=dtype).view(stop - start, *rest)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


@dataclass
class Change:
    """What one adapter makes of one tensor. `layer`: PEFT's module on meta; None: `keys` holds one tensor that replaces it."""

    layer: LoraLayer | None
    keys: dict[str, str]  # parameter of the layer -> key in the adapter's file
    by_rows: bool = True

    def merged(self, base: Tensor, start: int, stop: int, adapter: Tensors, bias: Tensor | None = None) -> Tensor:
        """base (rows, ...) float32, rows [start, stop) of the tensor -> those rows merged; with `bias`: of the bias."""
        if self.layer is None:
            (key,) = self.keys.values()
            return adapter.rows(key, start, stop).float()
        layer = copy.deepcopy(self.layer)
        _put(layer, "base_layer.weight", base)
        for name, key in self.keys.items():
            _put(layer, name, _part(name, adapter, key, start, stop) if self.by_rows else adapter.rows(key).float())
        if layer.lora_bias.get(NAME) and layer.base_layer.bias is not None:
            _put(layer, "base_layer.bias", torch.zeros(stop - start) if bias is None else bias)
        try:
            layer.merge(safe_merge=True, adapter_names=[NAME])
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise InputError(f"PEFT cannot merge this adapter: {one_line(error)}") from error
        return (layer.base_layer.weight if bias is None else layer.base_layer.bias).data


def _put(layer: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _part(name: str, adapter: Tensors, key: str, start: int, stop: int) -> Tensor:
    # Rows of a linear weight are rows of B and places of DoRA's magnitude; rows of an embedding are columns of A
    if name.startswith("lora_embedding_A"):
        return adapter.rows(key).float()[:, start:stop]
    by_row = name.startswith(("base_layer", "lora_B", "lora_magnitude_vector"))
    return (adapter.rows(key, start, stop) if by_row else adapter.rows(key)).float()


@dataclass
class Adapter:
    """A finished adapter and what it changes."""

    folder: Path
    weight: float
    tensors: Tensors
    changes: dict[str, Change]

    @classmethod
    def of(cls, folder: Path, weight: float, config: LlamaConfig, base_name: str) -> Adapter:
        """The adapter in `folder`, checked against a model of `config`. Raises InputError."""
        how = str(read_adapter_config(folder).init_lora_weights).lower()
        if how.startswith(CHANGE_THE_BASE):
            raise InputError(
                f"adapter {folder}: init_lora_weights={how} has changed the base model's weights; save it as plain LoRA"
                " first (PEFT: save_pretrained(path_initial_model_for_weight_conversion=...))"
            )
        with torch.device("meta"):
            llama = LlamaForCausalLM(config)
        llama.config._name_or_path = llama.name_or_path = base_name
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # a tied head gets weights of its own
            warnings.filterwarnings("ignore", message=".*lora_bias.*")
            warnings.filterwarnings("ignore", message=".*meta.*no-op.*")
            names = [name for name, _ in llama.named_parameters(remove_duplicate=False)]
            wrapped, ours = fit_adapter(llama, folder)
        keys = {id(parameter): key for key, parameter in ours.items()}
        changes = {name: change for name in names if (change := _change(wrapped.get_base_model(), name, keys))}
        used = {key for change in changes.values() for key in change.keys.values()}
        if left := sorted(key for key, parameter in ours.items() if keys[id(parameter)] not in used):
            raise InputError(
                f"adapter {folder}: {len(left)} tensors of a kind that is not merged here, first {left[0]};"
                " merge it with PEFT's merge_and_unload"
            )
        return cls(folder, weight, Tensors([folder / WEIGHTS_FILE]), changes)


def _change(model: nn.Module, name: str, keys: dict[int, str]) -> Change | None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, ModulesToSaveWrapper):
        saved = getattr(module.modules_to_save[NAME], leaf)
        return Change(None, {leaf: keys[id(saved)]})
    if isinstance(module, LoraLayer) and (leaf == "weight" or module.lora_bias.get(NAME)):
        own = {n: keys[id(p)] for n, p in module.named_parameters() if id(p) in keys and n != "base_layer.bias"}
        variant = module.lora_variant.get(NAME)
        known = isinstance(module, LoraLinear) and (variant is None or isinstance(variant, DoraLinearVariant))
        return Change(module, own, known or (isinstance(module, Embedding) and variant is None))
    module = module.base_layer if isinstance(module, LoraLayer) else module
    key = keys.get(id(getattr(module, leaf)))
    return Change(None, {leaf: key}) if key else None


@dataclass
class Merge:
    """Base and adapters: which tensors the merged model has, and their rows."""

    config: LlamaConfig
    base: Tensors
    adapters: list[Adapter]
    dtype: torch.dtype
    untied: bool = False  # the head was tied to the embedding, and the adapter changes one of the two
    files: dict[str, list[str]] = field(default_factory=dict)  # tensors of each file to write

    def __post_init__(self) -> None:
        with torch.device("meta"):
            wanted = {n: tuple(p.shape) for n, p in LlamaForCausalLM(self.config).named_parameters()}
        tied = self.config.tie_word_embeddings
        self.untied = tied and any(n in a.changes for a in self.adapters for n in (HEAD, EMBEDDING))
        for name, shape in wanted.items():
            if name not in self.base.entries:
                raise InputError(f"the base model lacks {name}; copy it again")
            if self.base.shape(name) != shape:
                raise InputError(
                    f"{self.base.entries[name][0]}: {name} is {self.base.shape(name)}, config.json says {shape}"
                )
            self.files.setdefault(self.base.entries[name][0].name, []).append(name)
        if self.untied:
            self.files[self.base.entries[EMBEDDING][0].name].append(HEAD)

    def source(self, name: str) -> str:
        """The base's tensor that `name` starts from."""
        return EMBEDDING if name == HEAD and self.config.tie_word_embeddings else name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(self.source(name))

    def bytes(self, name: str) -> int:
        return torch.Size(self.shape(name)).numel() * self.dtype.itemsize

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The merged tensor in the output's dtype, some rows at a time. Raises InputError for a value that is not finite."""
        shape, changes = self.shape(name), [(a, a.changes[name]) for a in self.adapters if name in a.changes]
        rows = max(1, BLOCK // max(1, torch.Size(shape[1:]).numel()))
        if not all(change.by_rows for _, change in changes):
            rows = shape[0]
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            stored = self.base.rows(self.source(name), start, stop)
            if not changes:
                yield stored.to(self.dtype)
                continue
            merged = self._merged(name, stored.float(), start, stop, changes).to(self.dtype)
            if not torch.isfinite(merged).all():
                raise InputError(
                    f"{name}: not finite after merging; the adapter is damaged, or too large for {self.dtype}"
                )
            yield merged

    def _merged(self, name: str, base: Tensor, start: int, stop: int, changes: list[tuple[Adapter, Change]]) -> Tensor:
        total = None
        for adapter, change in changes:
            if name.endswith(".bias") and change.layer is not None:  # LoRA with a bias of its own
                weight = self.base.rows(f"{name.removesuffix('bias')}weight", start, stop).float()
                found = change.merged(weight, start, stop, adapter.tensors, base)
            else:
                found = change.merged(base, start, stop, adapter.tensors)
            if len(self.adapters) == 1 and adapter.weight == 1:
                return found  # PEFT's own bits
            total = base.clone() if total is None else total
            total += adapter.weight * (found - base)
        return total

    def write(self, folder: Path, tick) -> None:
        """Safetensors under the base's file names, and an index if there are several. `tick(bytes)` after each block."""
        for file, names in self.files.items():
            write_safetensors(folder / file, self, names, tick)
        if len(self.files) > 1:
            total = sum(self.bytes(name) for names in self.files.values() for name in names)
            where = {name: file for file, names in self.files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, merge: Merge, names: Sequence[str], tick) -> None:
    """One file, block by block: the library's own writer needs all of its tensors in memory."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + merge.bytes(name)
        header[name] = {"dtype": CODES[merge.dtype], "shape": list(merge.shape(name)), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for block in merge.blocks(name):
                file.write(block.contiguous().view(-1).view(torch.uint8).numpy().data)
                tick(block.nbytes)
        file.flush()
        os.fsync(file.fileno())
