"""Prompts of a generation run: from the command line, a file or the held-out records, as token ids that fit the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipes.pipeline import records
from recipes.pipeline.config import GenerateRecipe, InputError, TooLongPrompt
from recipes.pipeline.data import held_out_records
from recipes.pipeline.generation_plan import prompt_limit
from recipes.pipeline.prompts import encode_prompt, stop_ids
from recipes.pipeline.sampling import prompt_seed

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".json.gz", ".jsonl.gz", ".csv.gz")


@dataclass(frozen=True)
class Question:
    """One prompt. `ids` is None where it is too long and skipped; `tokens` counts it as given."""

    prompt: str  # as it was given; a record's instruction and input
    ids: list[int] | None
    tokens: int
    seed: int
    reference: str | None = None  # the record's own output


@dataclass(frozen=True)
class _Given:
    where: str  # for messages
    content: str | dict[str, str]  # a text, or a record
    seed: int | None = None

    @property
    def shown(self) -> str:
        return self.content if isinstance(self.content, str) else _text(self.content)


def _text(record: dict[str, str]) -> str:
    return "\n\n".join(filter(None, (record["instruction"], record.get("input"))))


def load(cfg: GenerateRecipe, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """All prompts of `cfg.generate`, in the order of their source. Raises InputError for an empty or damaged source."""
    given = _given(cfg)[: cfg.generate.max_prompts]
    limit = prompt_limit(cfg)
    questions = []
    for place, one in enumerate(given):
        seed = prompt_seed(cfg.seed, place) if one.seed is None else one.seed
        reference = one.content.get("output") or None if isinstance(one.content, dict) else None
        if any("\ud800" <= char <= "\udfff" for char in one.shown + (reference or "")):
            raise InputError(f"{one.where}: half of a surrogate pair, which is no character; mend the escape \\udXXX")
        ids = _encoded(one.content, cfg, tokenizer)
        if not ids:
            raise InputError(f"{one.where}: an empty text has no token to continue; give it at least one character")
        tokens = len(ids)
        fitting = ids if limit is None or tokens <= limit else _shortened(one, tokens, limit, cfg, tokenizer)
        questions.append(Question(one.shown, fitting, tokens, seed, reference))
    return questions


def ends(cfg: GenerateRecipe, tokenizer: PreTrainedTokenizerBase, of_model: list[int]) -> list[int]:
    """Tokens that end a completion: the model's, and where prompts are in a template the one that training put there."""
    own = stop_ids(cfg.data, tokenizer) if cfg.generate.template else []
    return list(dict.fromkeys([*own, *of_model]))


def _given(cfg: GenerateRecipe) -> list[_Given]:
    options = cfg.generate
    if options.held_out:
        return [_Given(f"held-out record {n}", record) for n, record in enumerate(held_out_records(cfg), 1)]
    if options.file is None:
        return [_Given(f"generate.prompt, text {n}", text) for n, text in enumerate(options.prompt, 1)]
    path = Path(options.file).expanduser()
    if not path.is_file():
        said = "a folder, give a file in it" if path.is_dir() else f"no such file{records.near(path)}"
        raise InputError(f"generate.file={path}: {said}")
    if not path.name.lower().endswith(ENDINGS):
        raise InputError(f"generate.file={path}: unknown ending; accepted: {' '.join(ENDINGS)}")
    given = _lines(path) if path.suffix.lower() == ".txt" else _rows(path, cfg)
    if not given:
        raise InputError(f"generate.file={path}: no prompt in it")
    return given


def _lines(path: Path) -> list[_Given]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # as editors count; a form feed is no new prompt
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error}); save it as UTF-8") from error
    return [_Given(f"{path} line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]


def _rows(path: Path, cfg: GenerateRecipe) -> list[_Given]:
    columns, given = cfg.data.columns, []
    for where, row in records.rows(path):
        place = f"{path} {where}"
        seed = row.get("seed") if isinstance(row, dict) else None
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise InputError(f"{place}: seed {seed!r} is not a whole number from 0 on; mend or remove it")
        if isinstance(row, str):
            given.append(_Given(place, row))
        elif isinstance(row, dict) and isinstance(row.get("prompt"), str):
            given.append(_Given(place, row["prompt"], seed))
        elif isinstance(row, dict) and isinstance(row.get(columns.instruction), str):
            names = {"instruction": columns.instruction, "input": columns.input, "output": columns.output}
            texts = {key: row.get(name) for key, name in names.items()}
            for key, text in texts.items():
                if not isinstance(text, str | None):
                    raise InputError(f"{place}: {names[key]} is {text!r}, not a text; put it in quotes or remove it")
            given.append(_Given(place, {key: text or "" for key, text in texts.items()}, seed))
        else:
            raise InputError(
                f"{place}: neither a text, nor an object with `prompt` or `{columns.instruction}` as text;"
                " other names: data.columns.instruction=NAME"
            )
    return given


def _encoded(content: str | dict[str, str], cfg: GenerateRecipe, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    content = {"instruction": content} if isinstance(content, str) else content
    if not content["instruction"].strip():
        return []
    if cfg.generate.template:
        return encode_prompt(content, cfg.data, tokenizer)
    return tokenizer(_text(content), verbose=False)["input_ids"]


def _shortened(
    one: _Given, tokens: int, limit: int, cfg: GenerateRecipe, tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    said = f"{one.where}: a prompt of {tokens} tokens, {limit} fit (generate.max_prompt_tokens, the model's positions)"
    if cfg.generate.too_long is TooLongPrompt.refuse:
        raise InputError(f"{said}; shorten it, or set generate.too_long=truncate or skip")
    if cfg.generate.too_long is TooLongPrompt.skip:
        print(f"{said}; skipped", file=sys.stderr)
        return None
    if not cfg.generate.template:
        ids = _encoded(one.content, cfg, tokenizer)
        start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
        print(f"{said}; its beginning is left out", file=sys.stderr)
        return start + ids[len(ids) - limit + len(start) :]
    content = {"instruction": one.content} if isinstance(one.content, str) else dict(one.content)
    key = max(("instruction", "input"), key=lambda name: len(content.get(name) or ""))
    text = content[key]

    def fits(size: int) -> bool:
        return len(_encoded({**content, key: text[:size]}, cfg, tokenizer)) <= limit

    size = _last(fits, len(text))
    if size is None:
        raise InputError(f"{said}; even without its {key} the template does not fit; raise generate.max_prompt_tokens")
    print(f"{said}; the end of its {key} is left out, {size} of {len(text)} characters stay", file=sys.stderr)
    return _encoded({**content, key: text[:size]}, cfg, tokenizer)


def _last(fits: Callable[[int], bool], highest: int) -> int | None:
    """The largest size from 1 that fits, by halving; None if none does."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None


def to_request(question: Question) -> Any:
    from recipes.pipeline.generation import Request

    return Request(question.ids, question.seed)
