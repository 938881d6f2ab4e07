"""Alpaca records -> prompt -> ids -> labels -> rows of tokens, cached on disk, and the collator that batches them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pipeline import batches, cache, prompts, records
from recipes.pipeline.batches import IGNORED, Collator, blank_rows
from recipes.pipeline.config import Batching, DataConfig, Holdout, InputError, LoraRecipe, LossOn, TooLong

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = ["Collator", "Data", "blank_rows", "build_data", "describe"]

_CHUNK = 1000  # records a tokenizer call
_SHOWN = 200  # tokens of a sample that `describe` shows


@dataclass(frozen=True)
class Data:
    """Rows of both splits: input_ids, labels, length, for packed rows position_ids.

    counts[split]: records (given), kept, dropped {reason: n}, truncated, rows, tokens, targets, remainder (tokens that
    filled no row), padding (share), overlap (eval records that also occur in train). fingerprint: what two runs must
    have in common for their losses to be comparable.
    """

    train: datasets.Dataset
    eval: datasets.Dataset
    collator: Collator
    counts: dict[str, dict[str, Any]]
    fingerprint: dict[str, Any]
    show_samples: int


def build_data(
    cfg: LoraRecipe,
    tokenizer: PreTrainedTokenizerBase,
    rank0_first: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Data:
    """Both splits of cfg.data, from the cache if it has them. Raises InputError for anything the user can mend.

    Inside `rank0_first()` rank 0 fills the cache; the other ranks come later and read it.
    """
    if tokenizer.pad_token_id is None:
        raise InputError("the tokenizer has no pad token; set model.pad_token to a token of its vocabulary")
    train, held_out = _sources(cfg)
    with rank0_first():
        identity = _identity(cfg.data, tokenizer, train, held_out)
        if cfg.train.do_train and identity["files"] == identity["eval_files"]:
            raise InputError(
                f"{held_out.key}: holds the records of data.path; leave it out to hold out a share of them"
            )
        entry = cache.Entry(cfg.data.cache_dir, _digest([identity, _code()]))
        splits, meta = entry.read() or entry.fill(*_prepare(cfg.data, tokenizer, train, held_out))
    _require_rows(cfg, splits, meta["counts"])
    collator = batches.collator_for(cfg, tokenizer.pad_token_id)
    sizes = {"train": cfg.train.per_device_train_batch_size, "eval": cfg.train.per_device_eval_batch_size}
    for name, rows in sizes.items():
        meta["counts"][name]["padding"] = batches.padding_share(list(splits[name]["length"]), cfg, collator, rows)
    fingerprint = {**identity, "held_out": meta["held_out"]}
    return Data(splits["train"], splits["eval"], collator, meta["counts"], fingerprint, cfg.data.show_samples)


def held_out_records(cfg: LoraRecipe) -> list[dict[str, str]]:
    """The records that training leaves out for evaluation, in the evaluation's order. Raises InputError if there is none."""
    train, held_out = _sources(cfg)
    source = held_out or train
    found = source.records(cfg.data.columns)
    if held_out is None:
        found = _hold_out(found, cfg.data, train.name)[1]
    if not found:
        raise InputError(
            f"{source.name}: no record is held out; set data.validation_split_percentage or data.eval_path"
        )
    return found[: cfg.data.max_eval_samples]


def _sources(cfg: LoraRecipe) -> tuple[records.Source, records.Source | None]:
    data = cfg.data
    train = records.locate(data.path, "data.path", data.split)
    if data.eval_path is not None:
        return train, records.locate(data.eval_path, "data.eval_path", data.eval_split or data.split)
    if data.eval_split is None:
        return train, None
    if train.files:
        raise InputError(
            f"data.eval_split={data.eval_split} names a split of a hub data set; for files use data.eval_path"
        )
    return train, replace(train, key="data.eval_split", split=data.eval_split)


def _identity(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, train: records.Source, held_out: records.Source | None
) -> dict[str, Any]:
    """All that decides the rows, by content and not by file names: for the cache's key and the fingerprint."""
    by = f"{data.validation_split_percentage:g} %, {data.holdout.name}"
    if data.holdout is Holdout.random:
        by += f", seed {data.holdout_seed}"
    columns = data.columns
    return {
        "files": train.sha256(),
        "eval_files": held_out.sha256() if held_out else None,
        "split": f"own {held_out.key.removeprefix('data.')}" if held_out else by,
        "columns": [columns.instruction, columns.input, columns.output],
        "template": _template_digest(data, tokenizer),
        "tokenizer": _tokenizer_digest(tokenizer),
        "loss_on": data.loss_on.name,
        "batching": data.batching.name,
        "max_seq_length": data.max_seq_length,
        "too_long": data.too_long.name,
        "max_train_samples": data.max_train_samples,
        "max_eval_samples": data.max_eval_samples,
    }


def _code() -> list[str]:
    """Text of the modules that make rows, so that no cached row is older than they are."""
    return [Path(file).read_text() for file in (prompts.__file__, records.__file__, batches.__file__, __file__)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _template_digest(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    probes = [{"instruction": "i", "output": "o"}, {"instruction": "i", "input": "n", "output": "o"}]
    return _digest([data.template.name, *(repr(prompts.render(probe, data, tokenizer)) for probe in probes)])


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("padding"), state.pop("truncation")  # state of the last call
    else:
        state = [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, prompts.adds_bos(tokenizer)]
    return _digest([state, special, str(getattr(tokenizer, "chat_template", None))])


def _prepare(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, train: records.Source, held_out: records.Source | None
) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:
    given = train.records(data.columns)
    if held_out:
        parts = {"train": given, "eval": held_out.records(data.columns)}
    else:
        parts = dict(zip(("train", "eval"), _hold_out(given, data, train.name), strict=True))
    limits = {"train": data.max_train_samples, "eval": data.max_eval_samples}
    parts = {name: part[: limits[name]] for name, part in parts.items()}
    splits, counts = {}, {}
    for name, part in parts.items():
        splits[name], counts[name] = _rows(part, data, tokenizer, name)
    trained = {_digest(record) for record in parts["train"]}
    evaluated = [_digest(record) for record in parts["eval"]]
    counts["eval"]["overlap"] = sum(digest in trained for digest in evaluated)
    return splits, {"counts": counts, "held_out": _digest(sorted(evaluated))}


def _hold_out(given: list[dict], data: DataConfig, name: str) -> tuple[list[dict], list[dict]]:
    """(train, eval). The share is rounded to the nearest record, as in the datasets library's `train[:4%]`.

    random: records in the order of a hash of seed and content, so that neither the order nor the file's name matters and
    records that occur twice fall on one side (but for a pair on the border).
    """
    percent = data.validation_split_percentage
    size = round(percent * len(given) / 100)
    if percent and size in (0, len(given)):
        raise InputError(
            f"{name}: {percent:g} % of {len(given)} records leaves none to {'train on' if size else 'evaluate'}; "
            "change data.validation_split_percentage or give data.eval_path"
        )
    order = list(range(len(given)))
    if data.holdout is Holdout.random:
        order.sort(key=lambda n: _digest([data.holdout_seed, given[n]]))
    chosen = set(order[:size])
    return [r for n, r in enumerate(given) if n not in chosen], [r for n, r in enumerate(given) if n in chosen]


def _rows(
    part: Sequence[dict], data: DataConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[datasets.Dataset, dict[str, Any]]:
    import datasets  # here: a memory plan has no rows

    dropped: Counter[str] = Counter()
    samples = list(_samples(part, data, tokenizer, dropped, name))
    size, remainder = data.max_seq_length, 0
    if data.batching is Batching.concatenated:
        rows, remainder = batches.concatenated(samples, size)
    else:
        rows = batches.packed(samples, size) if data.batching is Batching.packed else batches.plain(samples)
    counts = {
        "records": len(part),
        "kept": len(samples),
        "dropped": dict(dropped),
        "truncated": sum(sample["cut"] for sample in samples),
        "rows": len(rows),
        "tokens": sum(row["length"] for row in rows),
        "targets": sum(label != IGNORED for row in rows for label in row["labels"]),
        "remainder": remainder,
    }
    names = ["input_ids", "labels"] + ["position_ids"] * (data.batching is Batching.packed)
    features = {n: datasets.Sequence(datasets.Value("int32")) for n in names} | {"length": datasets.Value("int32")}
    return datasets.Dataset.from_dict(
        {n: [row[n] for row in rows] for n in features}, datasets.Features(features)
    ), counts


def _samples(
    part: Sequence[dict], data: DataConfig, tokenizer: PreTrainedTokenizerBase, dropped: Counter[str], name: str
) -> Iterator[dict[str, list[int]]]:
    """input_ids, labels and whether it was cut, of each kept record; the others are counted in `dropped` by reason."""
    from tqdm.auto import tqdm

    starts = tqdm(range(0, len(part), _CHUNK), f"tokenise {name}", unit="k", disable=None if len(part) > 4000 else True)
    with _parallel_tokenizer():
        for start in starts:
            chunk = part[start : start + _CHUNK]
            for record, encoded in zip(chunk, prompts.encode(chunk, data, tokenizer), strict=True):
                size = len(encoded.prompt) + len(encoded.response)
                reason = _unusable(record, encoded, size, data)
                if reason:
                    dropped[reason] += 1
                    continue
                ids = (encoded.prompt + encoded.response)[: data.max_seq_length]
                masked = len(encoded.prompt) if data.loss_on is LossOn.response else 0
                cut = size > data.max_seq_length
                yield {"input_ids": ids, "labels": [IGNORED] * masked + ids[masked:], "cut": cut}


def _unusable(record: dict, encoded: prompts.Encoded, size: int, data: DataConfig) -> str | None:
    limit = data.max_seq_length
    if data.loss_on is LossOn.response and not record["output"].strip():
        return "empty output"
    if size > limit and data.too_long is TooLong.drop:
        return f"longer than {limit} tokens"
    if len(encoded.prompt) >= limit:
        return f"prompt alone fills {limit} tokens"
    return "no target" if min(size, limit) < 2 else None


@contextlib.contextmanager
def _parallel_tokenizer() -> Iterator[None]:
    """All cores while tokenising; off afterwards, said aloud so that forked loader workers don't warn of it."""
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ[name] = "false"


def _require_rows(cfg: LoraRecipe, splits: dict[str, datasets.Dataset], counts: dict[str, dict]) -> None:
    data = cfg.data
    for name, wanted in (("train", cfg.train.do_train), ("eval", cfg.train.do_eval)):
        if not wanted or counts[name]["targets"]:
            continue
        where = data.eval_path if name == "eval" and data.eval_path else data.path
        given, dropped = counts[name]["records"], counts[name]["dropped"]
        if not given:
            raise InputError(
                f"{where}: no {name} record; set data.validation_split_percentage, data.eval_path or train.do_{name}"
            )
        if counts[name]["kept"]:
            raise InputError(
                f"{where}: the {given} {name} records fill no block of data.max_seq_length={data.max_seq_length} tokens "
                f"({counts[name]['remainder']} there); lower it, or set data.batching=packed"
            )
        why = ", ".join(f"{reason}: {n}" for reason, n in dropped.items())
        raise InputError(
            f"{where}: no {name} record of {given} is left ({why}); raise data.max_seq_length or mend the file"
        )


def describe(data: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Counts of both splits and the first rows decoded, trained tokens bold on a terminal, in ⟦ ⟧ elsewhere."""
    facts = data.fingerprint
    lines = [f"loss on {facts['loss_on']} tokens, {facts['batching']}, up to {facts['max_seq_length']} tokens a row"]
    lines += [f"{'':8}{'records':>9}{'rows':>9}{'tokens':>12}{'targets':>12}{'padding':>9}"]
    for name, c in data.counts.items():
        padding = f"{100 * c['padding']:.1f} %"
        lines.append(f"{name:8}{c['kept']:>9,}{c['rows']:>9,}{c['tokens']:>12,}{c['targets']:>12,}{padding:>9}")
    for name, c in data.counts.items():
        lines += [f"{name}: {n:,} of {c['records']:,} records dropped ({reason})" for reason, n in c["dropped"].items()]
        if c["truncated"]:
            lines.append(f"{name}: {c['truncated']:,} responses cut at {facts['max_seq_length']} tokens, without eos")
        if c["remainder"]:
            lines.append(f"{name}: {c['remainder']:,} tokens at the end fill no row")
        if c.get("overlap"):
            lines.append(f"{name}: {c['overlap']:,} of {c['records']:,} records also occur in train")
    rows = data.train if len(data.train) else data.eval
    for n in range(min(data.show_samples, len(rows))):
        lines += [f"sample {n + 1} (trained tokens marked)", _marked(rows[n], tokenizer, sys.stdout.isatty())]
    return "\n".join(lines)


def _marked(row: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase, terminal: bool) -> str:
    opening, closing = ("\033[1;32m", "\033[0m") if terminal else ("⟦", "⟧")
    text, run, trained = "", [], False
    shown = list(zip(row["input_ids"], row["labels"], strict=True))[:_SHOWN]
    for token, label in [*shown, (None, None)]:
        if run and (token is None or (label != IGNORED) is not trained):
            piece = tokenizer.decode(run, clean_up_tokenization_spaces=False)
            text += f"{opening}{piece}{closing}" if trained else piece
            run = []
        trained = label != IGNORED
        run.append(token)
    more = len(row["input_ids"]) - len(shown)
    return "\n".join(f"  | {line}" for line in text.split("\n")) + (f"\n  | ... {more:,} tokens more" if more else "")
