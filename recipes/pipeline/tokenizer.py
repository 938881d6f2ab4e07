"""The tokenizer, in agreement with the model's configuration on begin, end and padding.

Labels are never masked by token id in this project, so padding only needs an id that the model knows; it still must not be
the end token, which is a target.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.pipeline.config import InputError, ModelConfig
from recipes.pipeline.weights import locate, one_line

# Tokens that published Llama vocabularies keep for such uses, in order of preference
SPARE_TOKENS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|endoftext|>", "<unk>", "<|reserved_special_token_0|>")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else of the model itself. Raises InputError."""
    if (model.tokenizer or "") == "bytes":
        return bytes_tokenizer()
    if model.name_or_path == "random" and model.tokenizer is None:
        raise InputError(
            "model.tokenizer: a random model has none of its own; set model.tokenizer=bytes, a folder or a hub id"
        )
    source = locate(model.tokenizer or model.name_or_path, model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"no tokenizer can be read from {source}: {one_line(error)}; set model.tokenizer") from error
    if model.name_or_path != "random":
        agree(tokenizer, model, str(locate(model.name_or_path, model)))
    choose_padding(tokenizer, model.pad_token)
    tokenizer.padding_side = "left"  # of prompts; training pads in its collator
    return tokenizer


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte (0 to 255), then begin 256, end 257, padding 258: needs no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_letters()
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    backend.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def _byte_letters() -> list[str]:
    # GPT-2's letters for bytes: printable ones stand for themselves, the rest follow from code point 256 on
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def agree(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, source: str) -> None:
    """Begin and end of the model's configuration become the tokenizer's. Raises InputError where it has no such token."""
    config = LlamaConfig.from_pretrained(source, revision=model.revision)
    ends = as_list(config.eos_token_id)
    with contextlib.suppress(OSError):  # a model may have no generation configuration
        ends += as_list(GenerationConfig.from_pretrained(source, revision=model.revision).eos_token_id)
    for name, wanted in (("bos", as_list(config.bos_token_id)), ("eos", ends)):
        if not wanted or getattr(tokenizer, f"{name}_token_id") in wanted:
            continue
        token = tokenizer.convert_ids_to_tokens(wanted[0]) if wanted[0] < len(tokenizer) else None
        if token is None:
            raise InputError(
                f"the model's {name}_token_id {wanted[0]} is not in the tokenizer's vocabulary of {len(tokenizer)};"
                " set model.tokenizer to the model's own"
            )
        setattr(tokenizer, f"{name}_token", token)


def choose_padding(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> None:
    """A pad token that is not the end token and is in the vocabulary already. Raises InputError if there is none."""
    vocabulary = tokenizer.get_vocab()
    if wanted is not None:
        if wanted not in vocabulary:
            raise InputError(
                f"model.pad_token={wanted!r} is not in the vocabulary; a new token would need a larger embedding"
            )
        if vocabulary[wanted] == tokenizer.eos_token_id:
            raise InputError(f"model.pad_token={wanted!r} is the end token, which is trained; choose another")
        tokenizer.pad_token = wanted
    elif tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        spare = next(
            (
                token
                for token in SPARE_TOKENS
                if vocabulary.get(token, tokenizer.eos_token_id) != tokenizer.eos_token_id
            ),
            None,
        )
        if spare is None:
            raise InputError(
                "the tokenizer has no token to pad with beside its end token; name one of its tokens: model.pad_token=TOKEN"
            )
        tokenizer.pad_token = spare


def as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises InputError if the tokenizer can make an id that the embedding has not got."""
    token, index = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if index >= vocab_size:
        raise InputError(
            f"the tokenizer's token {token!r} has id {index}, the model's vocabulary is {vocab_size}:"
            " use the model's own tokenizer, or a model whose embedding was enlarged"
        )


def tokenizer_of_gguf(folder: Path, file: str, adds_bos: bool) -> PreTrainedTokenizerBase:
    """GGUF's tokenizer with its own rule on begin tokens (transformers always prepends one)."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if adds_bos:
        return tokenizer
    tokenizer.add_bos_token = False
    tokenizer.update_post_processor()
    named = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=tokenizer.chat_template, **named
    )
