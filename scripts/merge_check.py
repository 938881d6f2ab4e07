"""Does a merged model answer as base and adapters do? Logits against PEFT's unmerged model, in float32."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from recipes.pipeline.config import InputError

LOGITS = 1e-3  # largest difference in float32, nats
LOSS = 0.01  # difference of the mean loss in bfloat16, or twice what rounding the base alone moves
TEXTS = Path(__file__).resolve().parents[1] / "conf" / "data" / "smoke.jsonl"
ROWS, LENGTH = 16, 64  # of tokens; with fewer the loss is noise


def agreement(
    base: Path, merged: Path, adapters: Sequence[Path], weights: Sequence[float], dtype: str
) -> tuple[str, bool]:
    """A few lines, and whether the difference is inside the tolerance of `dtype`. Needs memory for one model in float32."""
    config = LlamaConfig.from_pretrained(merged)
    ids = rows_of_tokens(merged, config.vocab_size)
    wanted = _logits(lambda: unmerged(base, adapters, weights), ids)
    found = _logits(lambda: _load(merged), ids)
    lines, same, near = [], True, True
    logits, loss = (found - wanted).abs().max().item(), abs(_loss(found, ids) - _loss(wanted, ids))
    top = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    first = (
        f"check         merged against unmerged, {ids.numel()} tokens: logits differ by up to {logits:.2g}, loss by {loss:.2g},"
        f" most likely token the same {100 * top:.1f} %"
    )
    kept_tied = LlamaConfig.from_pretrained(base).tie_word_embeddings == config.tie_word_embeddings
    if dtype == "float32":
        same = logits <= LOGITS
        lines.append(f"{first} (logits within {LOGITS:g}: {_word(same)})")
    else:
        allowed = LOSS if loss <= LOSS else max(LOSS, 2 * _rounding(base, ids))
        near = loss <= allowed
        lines.append(f"{first} (loss within {allowed:.2g}, what rounding costs: {_word(near)})")
    if dtype != "float32" and list(weights) == [1.0] and kept_tied:  # PEFT's own merge changes a tied pair together
        rounded = _logits(lambda: _rounded(unmerged(base, adapters, weights).merge_and_unload()), ids)
        difference = (found - rounded).abs().max().item()
        same = difference <= LOGITS
        lines.append(
            f"check         merged against PEFT's merge, rounded to bfloat16: logits differ by up to {difference:.2g}"
            f" (within {LOGITS:g}: {_word(same)})"
        )
    same = same and near
    for file in merged.glob("*.gguf"):
        read = _logits(lambda file=file: _load(merged, gguf_file=file.name, config=config), ids)
        difference = (read - found).abs().max().item()
        right = difference <= LOGITS
        same = same and right
        lines.append(
            f"check         {file.name} read back: logits differ by up to {difference:.2g}"
            f" (within {LOGITS:g}: {_word(right)})"
        )
    return "\n".join(lines), same


def _rounding(base: Path, ids: Tensor) -> float:
    """How far rounding to bfloat16 moves the base's own loss."""
    whole, rounded = (_loss(_logits(build, ids), ids) for build in (lambda: _load(base), lambda: _rounded(_load(base))))
    return abs(whole - rounded)


def _word(right: bool) -> str:
    return "yes" if right else "NO"


def rows_of_tokens(folder: Path, vocabulary: int) -> Tensor:
    """(16, 64) ids: of this repository's records if there is a tokenizer, else drawn."""
    with contextlib.suppress(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        records = map(json.loads, TEXTS.read_text(encoding="utf-8").splitlines())
        text = "\n".join(f"{record['instruction']}\n{record['output']}\n" for record in records)
        return torch.tensor(tokenizer(text, verbose=False)["input_ids"][: ROWS * LENGTH]).view(ROWS, LENGTH)
    return torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def _load(folder: Path, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, **options)


def _logits(build: Callable[[], nn.Module], ids: Tensor) -> Tensor:
    model = build().eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    del model
    gc.collect()
    return logits


def _rounded(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():  # the rotary frequencies are buffers, and stay
        parameter.data = parameter.data.bfloat16().float()
    return model


def _loss(logits: Tensor, ids: Tensor) -> float:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def unmerged(base: Path, adapters: Sequence[Path], weights: Sequence[float]) -> nn.Module:
    """Base and adapters as PEFT runs them; several, or a weight: the base's output and each adapter's part of it."""
    model = PeftModel.from_pretrained(_load(base), adapters[0], adapter_name="0")
    for n, folder in enumerate(adapters[1:], 1):
        try:
            model.load_adapter(folder, adapter_name=str(n))
        except ValueError as error:
            raise InputError(
                f"--check: PEFT cannot run these adapters together ({error}); leave --check out"
            ) from error
    if list(weights) != [1.0]:
        for module in model.modules():
            if isinstance(module, LoraLayer | ModulesToSaveWrapper):
                _weigh(module, weights)
    return model


def _weigh(module: nn.Module, weights: Sequence[float]) -> None:
    run = module.forward
    below = module.base_layer if isinstance(module, LoraLayer) else module.original_module

    def forward(x: Tensor) -> Tensor:
        plain = below(x)
        total = plain
        for n, weight in enumerate(weights):
            module.set_adapter(str(n))
            total = total + weight * (run(x) - plain)
        return total

    module.forward = forward
