"""Alpaca record -> prompt and response -> token ids: one way in for training, evaluation and generation.

Prompt and response are encoded apart, so the prompt ids of a training sample are those of inference, and the place where
labels begin needs no search. Special tokens are inserted as ids: text of a record that looks like one stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from recipes.pipeline.config import DataConfig, InputError, LossOn, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = Mapping[str, str]  # keys instruction, input (may be absent), output (absent in inference)

_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
# (without input, with input); Stanford Alpaca's wording, which every Alpaca model has seen
ALPACA: dict[str, tuple[str, str]] = {
    "alpaca": (
        f"{_TASK}. {_REQUEST}### Response:\n",
        f"{_TASK}, paired with an input that provides further context. {_REQUEST}### Input:\n{{input}}\n\n### Response:\n",
    ),
    "alpaca_joined": (
        f"{_TASK}. {_REQUEST}### Response:",
        f"{_TASK}, paired with an input that provides further context. {_REQUEST}### Input:\n{{input}}\n\n### Response:",
    ),
}
# A continuation is encoded behind one of these and cut free, for tokenizers that put a space before a text's first word.
_ANCHORS = ("\n", "a", "=")


@dataclass(frozen=True)
class Text:
    """Encoded without looking for special tokens."""

    text: str


@dataclass(frozen=True)
class Token:
    """One entry of the vocabulary."""

    text: str


@dataclass(frozen=True)
class Markup:
    """Encoded with special tokens recognised: what a tokenizer's own template has written."""

    text: str


Piece = Text | Token | Markup


@dataclass(frozen=True)
class Rendered:
    prompt: tuple[Piece, ...]
    response: str
    end: str | None = None  # the token that ends the response; None: the tokenizer's eos


@dataclass(frozen=True)
class Encoded:
    prompt: list[int]  # with BOS where the tokenizer adds one
    response: list[int]  # with the end token


def render(record: Record, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """The texts of one record under data.template; a missing input is an empty one. InputError for a bad template."""
    name = data.template.value
    if name in ALPACA:
        if data.system_prompt is not None:
            raise InputError(
                f"data.system_prompt has no place in data.template={name}; choose a chat template or leave it out"
            )
        plain, with_input = ALPACA[name]
        text = (with_input if record.get("input") else plain).format(
            instruction=record["instruction"], input=record.get("input", "")
        )
        return Rendered((Text(text),), record.get("output", ""))
    user = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
    writer = {"llama2_chat": _llama2_chat, "llama3_chat": _llama3_chat}.get(name)
    if writer:
        return writer(user, record.get("output", ""), data.system_prompt)
    return _own_template(user, record.get("output", ""), data.system_prompt, tokenizer)


def _llama2_chat(user: str, output: str, system: str | None) -> Rendered:
    if system is not None:
        user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
    return Rendered((Text(f"[INST] {user.strip()} [/INST]"),), f" {output.strip()} ")


def _llama3_chat(user: str, output: str, system: str | None) -> Rendered:
    def turn(role: str, content: str) -> tuple[Piece, ...]:
        head = (Token("<|start_header_id|>"), Text(role), Token("<|end_header_id|>"))
        return (*head, Text(f"\n\n{content.strip()}"))

    end = Token("<|eot_id|>")
    opening = (Token("<|begin_of_text|>"), *((*turn("system", system), end) if system is not None else ()))
    return Rendered((*opening, *turn("user", user), end, *turn("assistant", "")), output.strip(), end.text)


def _own_template(user: str, output: str, system: str | None, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("data.template=tokenizer: this tokenizer has no chat template; use alpaca or llama3_chat")
    turns = [{"role": "system", "content": system}] if system is not None else []
    prompt, answer = _own_turn(turns, user, output, tokenizer)
    tail, space, end = _own_ending(tokenizer, tokenizer.chat_template, system)
    return Rendered((Markup(prompt),), answer.removesuffix(tail) + space, end)


@lru_cache(maxsize=8)
def _own_ending(tokenizer: PreTrainedTokenizerBase, _: str, system: str | None) -> tuple[str, str, str | None]:
    """What the template writes behind an answer, the part of it before the first special token, and that token."""
    turns = [{"role": "system", "content": system}] if system is not None else []
    tail = _own_turn(turns, "x", "probe", tokenizer)[1].partition("probe")[2]
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    found = [i for i in _ids([tail], tokenizer, markup=True)[0] if i in special]
    end = tokenizer.convert_ids_to_tokens(found[0]) if found else None
    return tail, tail.partition(end)[0] if end else "", end


def _own_turn(
    turns: list[dict[str, str]], user: str, output: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str]:
    asked = [*turns, {"role": "user", "content": user}]
    try:
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": output}], tokenize=False)
    except Exception as error:  # jinja's errors, and what templates raise themselves
        raise InputError(
            f"data.template=tokenizer: the tokenizer's chat template refuses this record: {error}"
        ) from error
    if not whole.startswith(prompt):
        raise InputError(
            "data.template=tokenizer: this chat template writes another prompt in training than in inference; "
            "use alpaca or llama3_chat"
        )
    return prompt, whole[len(prompt) :]


def encode(records: Sequence[Record], data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Prompt and response ids of each record, in one tokenizer call a kind of text (fast tokenizers run it in parallel)."""
    rendered = [render(record, data, tokenizer) for record in records]
    ends = {end: [_token_id(end, tokenizer)] for end in {r.end for r in rendered}}
    if data.template is Template.alpaca_joined:
        if data.loss_on is not LossOn.all:
            raise InputError(
                "data.template=alpaca_joined has no border between prompt and response; set data.loss_on=all"
            )
        joined = _encode_rows([(Text(r.prompt[0].text + r.response),) for r in rendered], tokenizer)
        return [Encoded([], ids + ends[r.end]) for ids, r in zip(joined, rendered, strict=True)]
    prompts = _encode_rows([r.prompt for r in rendered], tokenizer)
    responses = _continue([r.response for r in rendered], tokenizer)
    return [Encoded(p, ids + ends[r.end]) for p, ids, r in zip(prompts, responses, rendered, strict=True)]


def encode_prompt(record: Record, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the inference prompt: the first ids of the record's training sample (but for alpaca_joined's last border)."""
    return _encode_rows([render(record, data, tokenizer).prompt], tokenizer)[0]


def stop_ids(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids at which generation ends: the one that training puts behind a response, then the tokenizer's eos if another."""
    end = _token_id(render({"instruction": "x", "output": "x"}, data, tokenizer).end, tokenizer)
    return list(dict.fromkeys(i for i in (end, tokenizer.eos_token_id) if i is not None))


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a sequence of this tokenizer starts with BOS: its add_bos_token, or else what its post-processor does."""
    if tokenizer.bos_token_id is None:
        return False
    flag = getattr(tokenizer, "add_bos_token", None)
    return flag if flag is not None else tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def _encode_rows(rows: Sequence[tuple[Piece, ...]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    def of(kind: type, first: bool) -> list[str]:
        return [p.text for row in rows for n, p in enumerate(row) if isinstance(p, kind) and (n == 0) is first]

    starts, markup = iter(_ids(of(Text, True), tokenizer)), iter(_ids(of(Markup, True), tokenizer, markup=True))
    later = iter(_continue(of(Text, False), tokenizer))
    tokens = {p.text: [_token_id(p.text, tokenizer)] for row in rows for p in row if isinstance(p, Token)}
    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    encoded = []
    for row in rows:
        ids: list[int] = []
        for n, piece in enumerate(row):
            if isinstance(piece, Token):
                ids += tokens[piece.text]
            elif isinstance(piece, Markup):
                ids += next(markup)
            else:
                ids += next(starts if n == 0 else later)
        encoded.append(ids if ids[:1] == bos else bos + ids)
    return encoded


def _continue(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids of texts that follow other ids: without the space that SentencePiece tokenizers put before a first word."""
    if _ids(["a"], tokenizer) == _behind("\n", ["a"], tokenizer):
        return _ids(texts, tokenizer)
    result: list[Any] = [None] * len(texts)
    for anchor in _ANCHORS:
        missing = [n for n, ids in enumerate(result) if ids is None]
        for n, ids in zip(missing, _behind(anchor, [texts[n] for n in missing], tokenizer), strict=True):
            result[n] = ids
    if None in result:
        raise InputError(f"the tokenizer can't continue a text with {texts[result.index(None)][:40]!r}")
    return result


def _behind(anchor: str, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int] | None]:
    start, *whole = _ids([anchor, *(anchor + text for text in texts)], tokenizer)
    return [ids[len(start) :] if ids[: len(start)] == start else None for ids in whole]


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, markup: bool = False) -> list[list[int]]:
    if not texts:
        return []
    call = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, **call, split_special_tokens=not markup, verbose=False)["input_ids"]


def _token_id(token: str | None, tokenizer: PreTrainedTokenizerBase) -> int:
    if token is None:
        if tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no eos token, so that a response has no end; choose another model.tokenizer"
            )
        return tokenizer.eos_token_id
    index = tokenizer.convert_tokens_to_ids(token)
    if index is None or tokenizer.convert_ids_to_tokens(index) != token:
        raise InputError(
            f"the tokenizer has no token {token!r}, which this data.template needs; use data.template=alpaca"
        )
    return index
