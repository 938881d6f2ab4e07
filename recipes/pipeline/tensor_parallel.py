"""One Llama over several ranks, each with a share of every layer's heads and inner width (Shoeybi et al., 2019).

Each rank builds the model of a narrower configuration and reads only its own rows or columns of each weight, so that no rank
ever holds a whole one. q, k, v, gate and up are cut by rows (outputs), o and down by columns (inputs) with a sum over the
ranks behind them; the vocabulary's tables are cut by rows, with a sum behind the lookup and a gathering of the scores.

Why not deepspeed.init_inference or DTensor: both cut a model that every rank has loaded whole before, DeepSpeed keeps the
vocabulary's tables whole on every card, and DTensor has no entry in Gaudi's software. On 2 ranks of a CPU (gloo, float32, 16
layers of 1024, batch 4) a decoding step takes 0.69 of DTensor's time and 0.88 of DeepSpeed's, and a rank's host memory peaks
at 1016 MiB against 2097 and 1632; the benchmark in test_tensor_parallel.py measures it. What is used here is
torch.distributed's all_reduce and all_gather, which HCCL, NCCL and gloo all have.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import LlamaConfig
from transformers.modeling_utils import no_init_weights

from modeling.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaHead
from recipes.pipeline.config import InputError
from recipes.pipeline.weights import DTYPES, tensor_entries

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
TABLES = ("embed_tokens", "lm_head")
BLOCK = 32 * 1024**2  # bytes of a weight in memory beside the share that is kept of it


@dataclass(frozen=True)
class Shares:
    """This rank's place among those that share a model."""

    rank: int
    ranks: int
    group: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, rank: int, world_size: int, ranks: int) -> Shares:
        """Neighbouring ranks share a model. Collective: every rank makes every group."""
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world_size, ranks)]
        return cls(rank % ranks, ranks, groups[rank // ranks])

    def cut(self, name: str) -> tuple[str, int | None]:
        """How the tensor `name` of a model or an adapter is shared: ("cut", dimension), ("whole", None), ("first", None)."""
        *path, kind = _adapter_path(name) if "lora_" in name else name.split(".")
        module = path[-1]
        if module in TABLES and kind.startswith("lora"):
            raise InputError(f"{name}: an adapter of the vocabulary's tables cannot be shared; merge it first")
        if module in BY_ROWS:
            return ("whole", None) if kind == "lora_A" else ("cut", 0)
        if module in BY_COLUMNS:
            if kind == "bias":
                return "first", None  # added once, by the sum
            return ("whole", None) if kind == "lora_B" else ("cut", 1)
        return ("cut", 0) if module in TABLES else ("whole", None)

    def span(self, size: int) -> tuple[int, int]:
        """Begin and end of this rank's part of a dimension; the last parts may be shorter."""
        part = -(-size // self.ranks)
        return min(self.rank * part, size), min((self.rank + 1) * part, size)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's share of a whole tensor."""
        how, dim = self.cut(name)
        if how == "first":
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        if dim is None:
            return tensor
        begin, end = self.span(tensor.shape[dim])
        return tensor.narrow(dim, begin, end - begin)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor from a share's, for tensors that divide evenly."""
        dim = self.cut(name)[1]
        return tuple(size * self.ranks if n == dim else size for n, size in enumerate(shape))

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        """(..., n) of each rank -> (..., ranks * n)."""
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


def _adapter_path(name: str) -> list[str]:
    # ...q_proj.lora_A.weight or ...q_proj.lora_A.default.weight
    parts = name.split(".")
    place = next(n for n, part in enumerate(parts) if part.startswith("lora_"))
    if parts[place] not in ("lora_A", "lora_B"):
        raise InputError(
            f"{name}: an adapter with DoRA, or on the vocabulary's tables, needs whole weights; merge it first,"
            " or use generate.tensor_parallel=1"
        )
    return parts[: place + 1]


def narrowed(config: LlamaConfig, ranks: int) -> LlamaConfig:
    """The configuration of one rank's share. Raises InputError, with the numbers, where heads or width do not divide."""
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name in sizes:
        if getattr(config, name) % ranks:
            raise InputError(
                f"generate.tensor_parallel={ranks} does not divide the model's {name} {getattr(config, name)}; choose a divisor"
            )
    own = copy.deepcopy(config)
    own.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in sizes:
        setattr(own, name, getattr(config, name) // ranks)
    return own


class TableShard(nn.Embedding):
    """Rows `begin` and on of the embedding; ids (B, S) of other rows give zeros before the sum."""

    def __init__(self, config: LlamaConfig, shares: Shares) -> None:
        super().__init__(-(-config.vocab_size // shares.ranks), config.hidden_size)
        self.shares = shares

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.shares.rank * self.num_embeddings
        mine = local.ge(0) & local.lt(self.num_embeddings)
        found = super().forward(local.clamp(0, self.num_embeddings - 1))
        return self.shares.sum(found * mine.unsqueeze(-1))


class HeadShard(LlamaHead):
    """Scores of this rank's rows of the head, gathered: hidden (..., H) -> (..., V)."""

    def __init__(self, config: LlamaConfig, shares: Shares) -> None:
        super().__init__(config.hidden_size, -(-config.vocab_size // shares.ranks), bias=False)
        self.shares, self.vocabulary = shares, config.vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        return self.shares.join(nn.Linear.forward(self, hidden))[..., : self.vocabulary]


def empty_model(config: LlamaConfig, dtype: torch.dtype, shares: Shares) -> LlamaForCausalLM:
    """A rank's share of a Llama, its weights allocated and zero. One rank: the whole model, in memory of its own."""
    with no_init_weights(), torch.device("meta"):
        model = LlamaForCausalLM(narrowed(config, shares.ranks))
        if shares.ranks > 1:
            model.model.embed_tokens, model.lm_head = TableShard(config, shares), HeadShard(config, shares)
    model = model.to(dtype).to_empty(device="cpu")
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.shares = shares
    return model


def copy_into(model: LlamaForCausalLM, whole: nn.Module) -> None:
    """Take this rank's share from a model that is there whole (a random one)."""
    given = whole.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _place(parameter, model.shares.part(name, given[name]))


def read_into(model: LlamaForCausalLM, files: list[Path]) -> None:
    """Read this rank's share of each weight, and no more of a file. Raises InputError for missing or misshapen weights."""
    wanted = dict(model.named_parameters())
    with torch.no_grad():
        for file in files:
            for name, entry in tensor_entries(file).items():
                if name in wanted:
                    _read(file, name, entry, wanted.pop(name), model.shares)
    if wanted:
        raise InputError(
            f"{files[0].parent}: {len(wanted)} weights are missing, first {sorted(wanted)[0]}; copy the model again"
        )


def _read(file: Path, name: str, entry: dict[str, Any], parameter: nn.Parameter, shares: Shares) -> None:
    if entry["dtype"] not in DTYPES:
        raise InputError(f"{file}: {name} is {entry['dtype']}; this project reads {', '.join(DTYPES)}")
    shape, dtype = entry["shape"], getattr(torch, DTYPES[entry["dtype"]])
    how, dim = shares.cut(name)
    rows = shares.span(shape[0]) if dim == 0 else (0, shape[0])
    columns = shares.span(shape[1]) if dim == 1 else (0, shape[-1])
    if how == "first" and shares.rank:
        return
    width = shape[1] if len(shape) == 2 else 1
    step = max(1, BLOCK // (width * dtype.itemsize))
    target = parameter.data.view(parameter.shape[0], -1)
    needed = (rows[1] - rows[0], columns[1] - columns[0] if len(shape) == 2 else 1)
    if name.split(".")[-2] in TABLES:  # a table's last share may be shorter
        needed = (-(-shape[0] // shares.ranks), needed[1])
    if needed != tuple(target.shape):
        raise InputError(f"{file}: {name} is {tuple(shape)}, which does not fit config.json; copy the model again")
    with file.open("rb") as stream:
        for first in range(rows[0], rows[1], step):
            count = min(step, rows[1] - first)
            data = bytearray(count * width * dtype.itemsize)
            stream.seek(entry["begin"] + first * width * dtype.itemsize)
            stream.readinto(data)
            block = torch.frombuffer(data, dtype=dtype).view(count, width)
            if len(shape) == 2:
                block = block[:, columns[0] : columns[1]]
            target[first - rows[0] : first - rows[0] + count] = block


def _place(parameter: nn.Parameter, part: Tensor) -> None:
    parameter.data[: part.shape[0]] = part  # the last share of a table may be shorter


def connect(model: nn.Module, shares: Shares) -> nn.Module:
    """Sum over the ranks behind the products that are cut by columns, whatever wraps them by now."""

    def summed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return shares.sum(output)

    for layer in (module for module in model.modules() if isinstance(module, LlamaDecoderLayer)):
        layer.self_attn.o_proj.register_forward_hook(summed)
        layer.mlp.down_proj.register_forward_hook(summed)
    return model
