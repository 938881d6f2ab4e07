"""A Llama folder as one GGUF file, for llama.cpp: tensors in its names and order of rotary pairs, metadata, tokenizer.

Memory: one tensor at a time. The names and keys come from llama.cpp's own `gguf` package.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    SpecialVocab,
    TokenType,
    get_tensor_name_map,
)
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from recipes.pipeline.config import InputError
from recipes.pipeline.prompts import adds_bos
from recipes.pipeline.weights import read_json
from scripts.merging import Tensors

TOKENIZER = "tokenizer.json"
ROPE_FREQUENCIES = "rope_freqs.weight"
# Our test of how a byte-level tokenizer cuts text -> llama.cpp's name for it
CUTS = {
    "llama-bpe": lambda parts: any("\\p{N}{1,3}" in str(part.get("pattern")) for part in parts),
    "smollm": lambda parts: any(part["type"] == "Digits" and part.get("individual_digits") for part in parts),
    "gpt-2": lambda parts: len(parts) == 1 and parts[0].get("use_regex", True),
}


def write_gguf(path: Path, folder: Path, tensors: Tensors, config: LlamaConfig, name: str, source: Path | None) -> None:
    """`tensors` as `path`; the tokenizer of `source`, a GGUF file, or of `folder`. Raises InputError for what llama.cpp lacks."""
    logging.getLogger("gguf").setLevel(logging.ERROR)
    writer = GGUFWriter(path, "llama")
    try:
        half = tensors.dtype("model.embed_tokens.weight") is torch.bfloat16
        writer.add_name(name)
        writer.add_file_type(LlamaFileType.MOSTLY_BF16 if half else LlamaFileType.ALL_F32)
        _add_shape(writer, config)
        extra = _add_rope_scaling(writer, config)
        _copy_tokenizer(writer, source) if source else _add_tokenizer(writer, folder, config)
        names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
        order = {key: names.get_name(key, try_suffixes=(".weight", ".bias")) for key in tensors.entries}
        for key, theirs in order.items():
            _announce(writer, theirs, tensors.shape(key), half and len(tensors.shape(key)) > 1)
        for theirs, value in extra.items():
            _announce(writer, theirs, tuple(value.shape), False)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key in order:
            writer.write_tensor_data(_stored(_in_pairs(tensors.rows(key), key, config)))
        for value in extra.values():
            writer.write_tensor_data(value.numpy())
    finally:
        writer.close()


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], half: bool) -> None:
    size = math.prod(shape)
    if half:
        in_bytes = (*shape[:-1], shape[-1] * 2)
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), size * 2, GGMLQuantizationType.BF16)
    else:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size * 4)


def _stored(tensor: Tensor) -> np.ndarray:
    if tensor.dim() == 1 or tensor.dtype is torch.float32:  # llama.cpp wants norms and biases in float32
        return tensor.float().contiguous().numpy()
    return tensor.contiguous().view(torch.uint8).numpy()


def _in_pairs(tensor: Tensor, key: str, config: LlamaConfig) -> Tensor:
    """Rows of q and k with the two numbers that are rotated together side by side; Hugging Face keeps them half a head apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add_shape(writer: GGUFWriter, config: LlamaConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(head)
    if head * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head)
        writer.add_value_length(head)


def _add_rope_scaling(writer: GGUFWriter, config: LlamaConfig) -> dict[str, Tensor]:
    """Metadata of stretched positions; returns the tensors that go with it."""
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":  # llama.cpp divides the frequencies by these
        plain = LlamaConfig.from_dict({**config.to_dict(), "rope_scaling": None})
        frequencies = [ROPE_INIT_FUNCTIONS[k](c, "cpu")[0] for k, c in (("default", plain), ("llama3", config))]
        return {ROPE_FREQUENCIES: (frequencies[0] / frequencies[1]).float()}
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            length = scaling.get("original_max_position_embeddings", config.max_position_embeddings)
            writer.add_rope_scaling_orig_ctx_len(length)
    elif kind != "default":
        raise InputError(f"--gguf: llama.cpp has no rope_scaling of type {kind} for Llama; merge without --gguf")
    return {}


# Tokenizer


def _copy_tokenizer(writer: GGUFWriter, source: Path) -> None:
    for key, found in GGUFReader(source).fields.items():
        if key.startswith("tokenizer."):
            array = found.types[0] is GGUFValueType.ARRAY
            writer.add_key_value(key, found.contents(), found.types[0], found.types[-1] if array else None)


def _add_tokenizer(writer: GGUFWriter, folder: Path, config: LlamaConfig) -> None:
    file = folder / TOKENIZER
    if not file.is_file():
        raise InputError(
            f"--gguf: {file.name} is not in the base's folder, and a GGUF file holds its tokenizer; add it"
        )
    described = read_json(file)
    model, added = described["model"], {token["id"]: token for token in described["added_tokens"]}
    parts = _flat(described.get("pre_tokenizer"))
    byte_level = any(part["type"] == "ByteLevel" for part in parts)  # then byte_fallback, if set, never takes effect
    sentencepiece = bool(model.get("byte_fallback")) and not byte_level
    if model.get("type") != "BPE" or not (sentencepiece or byte_level):
        raise InputError(f"--gguf: {file.name} is neither byte-level BPE nor SentencePiece BPE; merge without --gguf")
    tokens: list[str] = [f"[PAD{n}]" for n in range(config.vocab_size)]
    types: list[int] = [TokenType.UNUSED] * config.vocab_size
    for token, index in (model["vocab"] | {t["content"]: i for i, t in added.items()}).items():
        tokens[index], types[index] = token, _type(token, index, model if sentencepiece else {}, added)
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if sentencepiece else _cut(parts))
    writer.add_token_list(tokens)
    if sentencepiece:
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix(_puts_space_first(described))
    writer.add_token_types(types)
    special = SpecialVocab(folder, load_merges=True, n_vocab=config.vocab_size)
    special.add_special_token["bos"] = adds_bos(AutoTokenizer.from_pretrained(folder))  # never left to a default
    special.add_to_gguf(writer, quiet=True)


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    inner = part.get("pretokenizers", part.get("normalizers"))
    return [part] if inner is None else [leaf for one in inner for leaf in _flat(one)]


def _cut(parts: list[dict[str, Any]]) -> str:
    for name, fits in CUTS.items():
        if fits(parts):
            return name
    raise InputError(
        f"--gguf: llama.cpp's name for this tokenizer's way to cut text is not known here ({json.dumps(parts)[:120]}); merge"
        " without --gguf and convert the folder with llama.cpp's convert_hf_to_gguf.py"
    )


def _type(token: str, index: int, model: dict[str, Any], added: dict[int, dict[str, Any]]) -> int:
    if token == model.get("unk_token") and model.get("byte_fallback"):
        return TokenType.UNKNOWN
    if index in added:
        return TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
    is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece joins the pair whose piece scores best: here the pair that comes first among the merges."""
    rank: dict[str, int] = {}
    for n, pair in enumerate(model["merges"]):
        rank.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), n)
    last = len(rank)
    return [-float(rank.get(token, last)) for token in tokens]


def _puts_space_first(described: dict[str, Any]) -> bool:
    parts = _flat(described.get("normalizer")) + _flat(described.get("pre_tokenizer"))
    return any(
        part["type"] == "Prepend" or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )
