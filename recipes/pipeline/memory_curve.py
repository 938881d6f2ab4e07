"""The memory of a run as it is: one training step's, or one batch's, curve beside what was planned for it, as memory.png.

On a CPU the allocator's own events are recorded (torch's profiler) over one step; on a card its statistics, step by step.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from recipes.pipeline.batches import IGNORED
from recipes.pipeline.config import GenerateRecipe, InputError, LoraRecipe
from recipes.pipeline.runtime import GIB

if TYPE_CHECKING:
    from recipes.pipeline.generation import Generator

PICTURE, CURVE = "memory.png", "memory.json"
POINTS = 2000
PLANNED, SEEN = "planned_memory (GB)", "seen_memory (GB)"


@dataclass
class Seen:
    """A curve of bytes, and what was planned for the same."""

    what: str  # in words
    static: int  # bytes that are there before
    curve: list[int] = field(default_factory=list)  # beside them on a CPU, in all on a card
    planned: int | None = None

    @property
    def peak(self) -> int:
        return self.static + max(self.curve, default=0)

    def results(self) -> dict[str, float]:
        """For all_results.json, GiB."""
        found = {SEEN: round(self.peak / GIB, 4)}
        return found if self.planned is None else {PLANNED: round(self.planned / GIB, 4)} | found


def compared(results: dict[str, Any]) -> list[str]:
    """A line with what was seen and what was planned, if both are in the results."""
    seen, planned = results.get(SEEN), results.get(PLANNED)
    if not seen or planned is None:
        return []
    return [f"of a step     {seen:g} GiB of tensors, planned {planned:g} GiB ({100 * (planned - seen) / seen:+.1f} %)"]


class CpuCurve:
    """Records what torch's CPU allocator hands out between `start` and `stop`."""

    def start(self) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()

    def stop(self) -> list[int]:
        """Bytes out since the start, event by event."""
        self.profile.__exit__(None, None, None)
        events = [e for e in self.profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        live, curve = 0, []
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            curve.append(live)
        return curve


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Of their storages, each once."""
    found = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}.values())


class MemoryWatch(TrainerCallback):
    """Records the second optimizer step of a run (the first makes the optimizer's states), or its only one."""

    def __init__(self, trainer: Any, cfg: LoraRecipe) -> None:
        self.trainer, self.cfg, self.runtime = trainer, cfg, trainer.runtime
        self.seen: Seen | None = None
        self.recorder: CpuCurve | None = None
        self.shape: tuple[int, int, int] | None = None  # rows, tokens and targets of the recorded step
        self.steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps += 1
        if self.runtime.kind != "cpu" or self.steps != min(2, state.max_steps) or self.trainer.step_shape is None:
            return
        states = (t for s in self.trainer.optimizer.state.values() for t in s.values())
        static = storage_bytes([*model.parameters(), *model.buffers(), *states])
        rows, length, targets = self.trainer.step_shape
        self.seen = Seen(
            f"training step {state.global_step + 1}: {rows} rows of {length} tokens, {targets} targets", static
        )
        self.shape = self.trainer.step_shape
        self.recorder = CpuCurve()
        self.recorder.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.recorder is not None:
            self.seen.curve = self.recorder.stop()
            self.recorder = None
        elif self.runtime.kind in ("cuda", "hpu"):
            self.seen = self.seen or Seen(f"training, {self.runtime.kind}'s statistics after each step", 0)
            self.seen.curve.append(self.runtime._memory_bytes()[1])

    def result(self, folder: Path) -> dict[str, float]:
        """Figures for the results; draws the picture. Rank 0's."""
        if self.seen is None or not self.runtime.is_main:
            return {}
        given = dict(zip(("rows", "length", "targets"), self.shape, strict=True)) if self.shape else {}
        self.seen.planned = planned(self.cfg, "training", **given)
        draw(folder, self.seen)
        return self.seen.results()


def planned(cfg: LoraRecipe, step: str, **given: Any) -> int | None:
    """Bytes planned for a step of the run with `given` in place of the configuration's sizes; None: no plan, and it is said why."""
    from modeling.memory import plan
    from recipes.pipeline import memory_plan

    try:
        wanted = memory_plan.request(cfg)
        work = dataclasses.replace(wanted.workloads[step], **given)
        return plan(wanted.build, work, wanted.setting, wanted.layers, wanted.fuse).nominal
    except (InputError, ValueError) as error:
        print(f"no memory plan: {error}", file=sys.stderr)
        return None


def step_shape(batches: list[dict[str, torch.Tensor]]) -> tuple[int, int, int]:
    """(rows, tokens, targets) of the largest micro-batch of a step."""
    largest = max(batches, key=lambda batch: batch["labels"].numel())
    targets = int(largest["labels"][:, 1:].ne(IGNORED).sum())
    return (*largest["labels"].shape, targets)


def watch_prompt(generator: Generator, cfg: GenerateRecipe) -> Seen | None:
    """The forward of a prompt, once more and recorded; its time is in no figure. On a card the statistics so far."""
    runtime, decoder = generator.runtime, generator.decoder
    if decoder is None or runtime.world_size > 1 or runtime.kind == "lazy":
        return None
    prompts, width = generator.widest
    seen = Seen(f"a batch of {len(prompts)} prompts of {width} tokens", 0)
    if runtime.kind == "cpu":
        tables = decoder.fused.tables if decoder.fused is not None else ()
        parts = (
            *generator.model.parameters(),
            *generator.model.buffers(),
            *decoder.cache.keys,
            *decoder.cache.values,
            *tables,
        )
        seen.static = storage_bytes(parts)
        recorder = CpuCurve()
        with torch.inference_mode(decoder.fused is not None), torch.no_grad():
            recorder.start()
            decoder.prefill(prompts, width, generator.tokenizer.pad_token_id or 0)
            seen.curve = recorder.stop()
    else:
        seen.what, seen.curve = f"generation, {runtime.kind}'s statistics", [runtime._memory_bytes()[1]]
    padded = any(len(prompt) < width for prompt in prompts)
    seen.planned = planned(cfg, "prompt", rows=len(prompts), length=width, keys=decoder.cache.length, masked=padded)
    return seen


def draw(folder: Path, seen: Seen) -> None:
    """memory.png and memory.json: the curve, and the planned line where there is a plan."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    step = max(1, -(-len(seen.curve) // POINTS))
    tops = [seen.static + max(seen.curve[n : n + step]) for n in range(0, len(seen.curve), step)]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.fill_between(
        [n * step for n in range(len(tops))], [top / GIB for top in tops], color="#9db4c0", label="seen", step="mid"
    )
    axes.axhline(seen.static / GIB, color="#2a6f97", linewidth=1, label="there before the step")
    if seen.planned is not None:
        axes.axhline(seen.planned / GIB, color="#c8553d", linewidth=1.6, linestyle="--", label="planned peak")
    axes.set(xlabel="event of the allocator", ylabel="GiB", title=seen.what)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / PICTURE)
    plt.close(figure)
    text = {
        "what": seen.what,
        "static": seen.static,
        "planned": seen.planned,
        "seen": seen.peak,
        "curve": tops,
        "unit": "bytes",
    }
    (folder / CURVE).write_text(json.dumps(text) + "\n", encoding="utf-8")
