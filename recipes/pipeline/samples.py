"""samples.md of a run: held-out prompts with the base model's answer, the adapter's, and the record's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase

from recipes.pipeline.config import GenerateConfig, Implementation, LoraRecipe
from recipes.pipeline.data import held_out_records
from recipes.pipeline.generation import Completion, end_ids, generate_texts
from recipes.pipeline.prompts import encode_prompt, stop_ids
from recipes.pipeline.runtime import Runtime

FILE = "samples.md"
# As entities: a backslash is shown by some renderers, and a pipe ends the cell in all
SPECIAL = {ord(char): f"&#{ord(char)};" for char in "&<>|*_`~[]\\$"}


def write(cfg: LoraRecipe, runtime: Runtime, folder: Path, trainer: Any) -> None:
    """Answer `cfg.samples` held-out prompts with and without the trainer's adapter; rank 0 writes the table. Collective."""
    if not cfg.samples or cfg.model.implementation is Implementation.stock:  # that one does not generate here
        return
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    if not isinstance(model, PeftModel):
        return
    records, prompts = fitting(cfg, tokenizer, model.config.max_position_embeddings)
    adapted = _answers(cfg, runtime, model, tokenizer, prompts)
    with model.disable_adapter():
        plain = _answers(cfg, runtime, model, tokenizer, prompts)
    if not runtime.is_main:
        return
    text = table(records, [_shown(c) for c in plain], [_shown(c) for c in adapted], heading(cfg, model))
    temporary = folder / f".{FILE}.part"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / FILE)
    print(f"samples       {os.path.relpath(folder / FILE)}", flush=True)


def fitting(
    cfg: LoraRecipe, tokenizer: PreTrainedTokenizerBase, positions: int
) -> tuple[list[dict[str, str]], list[list[int]]]:
    """The first `cfg.samples` held-out records whose prompt leaves room for an answer, and the prompts' ids."""
    records, prompts = [], []
    for record in held_out_records(cfg):
        ids = encode_prompt(record, cfg.data, tokenizer)
        if len(ids) + cfg.sample_tokens <= positions:
            records.append(record)
            prompts.append(ids)
        if len(records) == cfg.samples:
            break
    return records, prompts


def _answers(
    cfg: LoraRecipe, runtime: Runtime, model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> list[Completion]:
    # Modules as they are: the model may be used again, and joined weights would be stored anew
    options = GenerateConfig(max_new_tokens=cfg.sample_tokens, fused=False, stream=False)
    ends = list(dict.fromkeys([*stop_ids(cfg.data, tokenizer), *end_ids(model, tokenizer)]))
    return generate_texts(model, tokenizer, prompts, options, runtime, ends, cfg.runtime)


def _shown(completion: Completion) -> str:
    return completion.text + (" …" if completion.finish_reason == "length" else "")


def heading(cfg: LoraRecipe, model: PeftModel) -> str:
    """What the table shows, in two or three lines."""
    lines = [
        f"# Answers of {cfg.model.name_or_path} without and with the adapter",
        "",
        f"Held-out records of `{Path(cfg.data.path).name}`, {cfg.data.template.name} template; greedy, up to"
        f" {cfg.sample_tokens} tokens, … where that ended the answer.",
    ]
    if any(config.bias != "none" for config in model.peft_config.values()):
        lines.append("The biases that were trained are in the base's answers too: PEFT does not take them out.")
    return "\n".join(lines)


def table(records: list[dict[str, str]], plain: list[str], adapted: list[str], title: str) -> str:
    """Markdown: a row a record."""
    rows = [title, "", "| prompt | base | adapter | reference |", "|---|---|---|---|"]
    for record, before, after in zip(records, plain, adapted, strict=True):
        prompt = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        rows.append("| " + " | ".join(map(cell, (prompt, before, after, record["output"]))) + " |")
    if not records:
        rows.append("| no held-out prompt leaves room for an answer | | | |")
    return "\n".join(rows) + "\n"


def cell(text: str) -> str:
    """`text` as it stands in one cell of a Markdown table: nothing of it is markup, a line break is <br>."""
    escaped = text.strip().translate(SPECIAL)
    return "<br>".join(" ".join(line.split()) for line in escaped.splitlines())
