"""Does a merged model answer as base and adapters do? Logits against PEFT's unmerged model, in float32."""

from __future__ import annotations

import contextlib
import gc
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
LOSS = 0.01  # difference of the mean loss, where the merged weights are rounded to bfloat16
TEXTS = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    "Water boils at one hundred degrees Celsius at sea level, and at less on a mountain.",
    "def add(a, b):\n    return a + b\n",
)
LENGTH = 16  # tokens of a row


def agreement(
    base: Path, merged: Path, adapters: Sequence[Path], weights: Sequence[float], dtype: str
) -> tuple[str, bool]:
    """A few lines, and whether the difference is inside the tolerance of `dtype`. Needs memory for one model in float32."""
    config = LlamaConfig.from_pretrained(merged)
    ids = rows_of_tokens(merged, config.vocab_size)
    wanted = _logits(lambda: unmerged(base, adapters, weights), ids)
    found = _logits(lambda: _load(merged), ids)
    lines, same = [], True
    logits, loss = (found - wanted).abs().max().item(), abs(_loss(found, ids) - _loss(wanted, ids))
    top = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    if dtype == "float32":
        same, said = logits <= LOGITS, f"logits within {LOGITS:g}"
    else:
        same, said = loss <= LOSS, f"loss within {LOSS:g}"
    lines.append(
        f"check         merged against unmerged, {ids.numel()} tokens: logits differ by up to {logits:.2g}, loss by {loss:.2g},"
        f" most likely token the same {100 * top:.1f} % ({said}: {'yes' if same else 'NO'})"
    )
    kept_tied = LlamaConfig.from_pretrained(base).tie_word_embeddings == config.tie_word_embeddings
    if dtype == "bfloat16" and list(weights) == [1.0] and kept_tied:  # PEFT's merge changes a tied pair together
        rounded = _logits(lambda: _rounded(unmerged(base, adapters, weights).merge_and_unload()), ids)
        difference = (found - rounded).abs().max().item()
        right = difference <= LOGITS
        same = same and right
        lines.append(
            f"check         merged against PEFT's merge, rounded to bfloat16: logits differ by up to {difference:.2g}"
            f" (within {LOGITS:g}: {'yes' if right else 'NO'})"
        )
    for file in merged.glob("*.gguf"):
        read = _logits(lambda file=file: _load(merged, gguf_file=file.name, config=config), ids)
        difference = (read - found).abs().max().item()
        same = same and difference <= LOGITS
        lines.append(
            f"check         {file.name} read back: logits differ by up to {difference:.2g} (within {LOGITS:g})"
        )
    return "\n".join(lines), same


def rows_of_tokens(folder: Path, vocabulary: int) -> Tensor:
    """(4, 16) ids: of the texts if there is a tokenizer, else drawn."""
    with contextlib.suppress(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        encoded = [tokenizer(text, verbose=False)["input_ids"][:LENGTH] for text in TEXTS]
        return torch.tensor([ids + ids[: LENGTH - len(ids)] * LENGTH for ids in encoded])[:, :LENGTH]
    return torch.randint(0, vocabulary, (len(TEXTS), LENGTH), generator=torch.Generator().manual_seed(0))


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
