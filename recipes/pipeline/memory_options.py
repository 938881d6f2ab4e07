"""What each option changes in a plan, and the largest batch and sequence that fit a card. Used by scripts/plan.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recipes.pipeline.config import AdapterKind, Attention, GenerateRecipe, LoraRecipe
from recipes.pipeline.memory_plan import device_kind, main_plan, offloaded
from recipes.pipeline.preflight import shape_of
from recipes.pipeline.runtime import lazy_mode

MOST_ROWS = 4096
MOST_WITH_LOSS = 1024  # a plan takes ops for each chunk of the loss
GUESSES = 10  # plans by the curve through those before; a curve that leads nowhere is left for halving


def options(cfg: LoraRecipe) -> Iterator[tuple[str, LoraRecipe]]:
    """The configuration with one option changed, each that says something for it."""

    def changed(name: str, change: Callable[[LoraRecipe], None]) -> tuple[str, LoraRecipe]:
        other = copy.deepcopy(cfg)
        change(other)
        return name, other

    def set_(group: str, field: str, value: object) -> tuple[str, LoraRecipe]:
        shown = getattr(value, "name", value)
        shown = str(shown).lower() if isinstance(shown, bool) else shown
        return changed(f"{group}.{field}={shown}", lambda other: setattr(getattr(other, group), field, value))

    generating, kind = isinstance(cfg, GenerateRecipe), device_kind(cfg)
    lazy = lazy_mode(cfg.runtime, kind)
    if generating:
        yield set_("runtime", "in_place_residual", False)
    if lazy:
        yield set_("runtime", "mark_step", cfg.runtime.mark_step is False)
        if generating and not cfg.runtime.layers_per_mark_step:
            yield set_("runtime", "layers_per_mark_step", 10)
    flash = Attention.fused_sdpa if kind == "hpu" else Attention.sdpa
    eager = cfg.runtime.attention is Attention.eager
    yield set_("runtime", "attention", flash if eager else Attention.eager)
    if kind == "hpu" and not eager and not generating:
        yield changed(
            f"runtime.flash_attention_recompute={str(not cfg.runtime.flash_attention_recompute).lower()}",
            lambda other: _recompute(other, not cfg.runtime.flash_attention_recompute),
        )
    if generating:
        rows = cfg.generate.batch_size
        if isinstance(rows, int) and rows > 1:
            yield set_("generate", "batch_size", rows // 2)
        if not cfg.generate.prefill_chunk:
            yield set_("generate", "prefill_chunk", 512)
        return
    train = cfg.train
    if not train.do_train:
        return
    yield set_("train", "gradient_checkpointing", not train.gradient_checkpointing)
    yield set_("runtime", "loss_chunk", 10**9 if cfg.runtime.loss_chunk < 10**9 else 1024)
    if train.per_device_train_batch_size > 1:
        yield set_("train", "per_device_train_batch_size", train.per_device_train_batch_size // 2)
    if cfg.adapter.kind is AdapterKind.lora and not cfg.adapter.path:
        yield set_("adapter", "r", 2 * cfg.adapter.r)
    if cfg.deepspeed:
        for stage in {0, 2, 3} - {(cfg.deepspeed.get("zero_optimization") or {}).get("stage")}:
            yield changed(f"ZeRO stage {stage}", lambda other, stage=stage: _stage(other, stage))
        zero = cfg.deepspeed.get("zero_optimization") or {}
        if zero.get("stage") == 3:
            for part in ("offload_optimizer", "offload_param"):
                if not offloaded(zero, part):
                    yield changed(f"{part} to the host", lambda other, part=part: _offload(other, part))


def without(cfg: LoraRecipe) -> LoraRecipe | None:
    """The configuration without graph breaks and in-place add; None where it has neither."""
    if not isinstance(cfg, GenerateRecipe) and not lazy_mode(cfg.runtime, device_kind(cfg)):
        return None
    other = copy.deepcopy(cfg)
    other.runtime.mark_step = other.runtime.in_place_residual = False
    return other


def _recompute(cfg: LoraRecipe, wanted: bool) -> None:
    cfg.runtime.attention, cfg.runtime.flash_attention_recompute = Attention.fused_sdpa, wanted


def _stage(cfg: LoraRecipe, stage: int) -> None:
    cfg.deepspeed.setdefault("zero_optimization", {})["stage"] = stage


def _offload(cfg: LoraRecipe, part: str) -> None:
    cfg.deepspeed["zero_optimization"][part] = {"device": "cpu"}


@dataclass(frozen=True)
class Largest:
    """Rows, or tokens, up to which a plan's high figure stays within the card."""

    value: int | None  # None: not even the least
    bound: str = ""  # why it ends there, where it is not the card


def largest_rows(cfg: LoraRecipe, room: float, step: str, known: int | None = None) -> Largest:
    """Rows of a batch that fit into `room` bytes; `step`: the kind that decides, by its name in `memory_plan.plans`; `known`:
    the high figure of cfg as it is."""
    which = "eval" if step == "evaluation" else "train"
    field = (
        ("generate", "batch_size") if isinstance(cfg, GenerateRecipe) else ("train", f"per_device_{which}_batch_size")
    )
    most = MOST_ROWS if isinstance(cfg, GenerateRecipe) else MOST_WITH_LOSS
    given = getattr(getattr(cfg, field[0]), field[1])
    given = given if isinstance(given, int) else 1
    seen = {} if known is None else {given: known}
    return _largest(
        cfg, room, step, lambda other, n: setattr(getattr(other, field[0]), field[1], n), given, most, 1, seen
    )


def largest_length(cfg: LoraRecipe, room: float, step: str) -> Largest:
    """Tokens of a row (of a prompt) that fit, by 128; `step` as for rows."""
    from recipes.pipeline import generation_plan

    limit = shape_of(cfg).max_position_embeddings
    if isinstance(cfg, GenerateRecipe):
        limit -= cfg.generate.max_new_tokens

        def change(other: LoraRecipe, n: int) -> None:
            other.generate.max_prompt_tokens, other.generate.length_bucket = n, 1

    else:

        def change(other: LoraRecipe, n: int) -> None:
            other.data.max_seq_length = n

    given = generation_plan.longest_prompt(cfg, False) if isinstance(cfg, GenerateRecipe) else cfg.data.max_seq_length
    return _largest(cfg, room, step, change, given, limit, 128, {})


def _largest(
    cfg: LoraRecipe,
    room: float,
    step: str,
    change: Callable[[LoraRecipe, int], None],
    given: int,
    most: int,
    unit: int,
    seen: dict[int, int],
) -> Largest:
    def fits(places: int) -> bool:
        if places not in seen:
            other = copy.deepcopy(cfg)
            change(other, places * unit)
            seen[places] = main_plan(other, step).high
        return seen[places] <= room

    last = most // unit
    low, high = 0, last + 1  # in units: low fits, high does not
    guess = min(max(1, given // unit), last)
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        near = _meets(seen, room, guess) if len(seen) < GUESSES else (low + high) // 2
        guess = min(max(near, low + 1), high - 1)
    if low == 0:
        return Largest(None)
    bound = "the most that was looked at" if unit == 1 else "the model's positions"
    return Largest(low * unit, bound if low == last else "")


def _meets(seen: dict[int, int], room: float, near: int) -> int:
    """Where memory meets the room, by the parabola (or line) through the places seen that are nearest to it."""
    import numpy as np

    places = sorted(seen, key=lambda place: abs(seen[place] - room))[:3]
    if len(places) == 1:
        return near // 2 if seen[near] > room else 2 * near
    curve = np.polynomial.Polynomial.fit(places, [seen[place] - room for place in places], len(places) - 1)
    roots = [float(root.real) for root in curve.roots() if abs(root.imag) < 1e-9]
    return int(min(roots, key=lambda root: abs(root - places[0]))) if roots else (min(places) + max(places)) // 2
