"""Numbers of a run: loss as sum of nats over sum of targets, perplexity, throughput, the result files.

A batch's mean says nothing about the data's mean unless it is weighted: sums are kept, and divided once, over all ranks.
Keys are those of optimum-habana's reports; "GB" there means GiB.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from recipes.pipeline.batches import IGNORED
from recipes.pipeline.runtime import Runtime

# exp of more nats than this is beyond a float
LARGEST_LOSS = math.log(torch.finfo(torch.float64).max)


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Positions of `labels` (B, S) that are predicted: the first of a row never is. 0-d integer tensor."""
    return labels[:, 1:].ne(IGNORED).sum()


def target_sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nats (float32), targets and right guesses of `logits` (B, S, V) against unshifted `labels` (B, S), summed."""
    targets = labels[:, 1:].reshape(-1)
    scores = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    nats = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
    kept = targets.ne(IGNORED)
    return nats, kept.sum(), (scores.argmax(-1).eq(targets) & kept).sum()


class EvaluationSums:
    """Nats, targets and right guesses of an evaluation, kept on the device until it ends: no synchronisation by batch."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []

    def add(self, nats: torch.Tensor, targets: torch.Tensor, correct: torch.Tensor) -> None:
        row = torch.stack([nats.detach().float(), targets.float(), correct.float()])
        self.sums.append(row)

    def result(self, runtime: Runtime) -> dict[str, float]:
        """Loss (nats per target), perplexity, accuracy and target count over all ranks. Collective."""
        total = torch.zeros(3, dtype=torch.float64)
        for row in self.sums:
            total += row.cpu().double()
        if runtime.world_size > 1:
            shared = total if runtime.backend == "gloo" else total.float().to(runtime.device)
            torch.distributed.all_reduce(shared)
            total = shared.cpu().double()
        nats, targets, correct = total.tolist()
        if not targets:
            return {"eval_loss": math.nan, "perplexity": math.nan, "eval_accuracy": math.nan, "eval_targets": 0}
        loss = nats / targets
        accuracy = correct / targets
        return {
            "eval_loss": loss,
            "perplexity": perplexity(loss),
            "eval_accuracy": accuracy,
            "eval_targets": int(targets),
        }


def perplexity(loss: float) -> float:
    """exp(loss); infinite, with a warning, where that is beyond a float."""
    if math.isnan(loss) or loss > LARGEST_LOSS:
        warnings.warn(f"a loss of {loss} nats has no finite perplexity", stacklevel=2)
        return math.nan if math.isnan(loss) else math.inf
    return math.exp(loss)


class Throughput:
    """Samples and tokens per second of training. The first `warmup` optimizer steps and all pauses (evaluation,
    checkpoints) are left out of both count and time."""

    def __init__(self, runtime: Runtime, warmup: int) -> None:
        self.runtime, self.warmup = runtime, warmup
        self.steps = 0
        self.samples: torch.Tensor | int = 0
        self.tokens: torch.Tensor | int = 0
        self.seconds = 0.0
        self.mark = 0.0
        self.skipped = 0

    def start(self) -> None:
        self.mark = time.perf_counter()

    def pause(self) -> None:
        """Time from now on does not count, until `start`."""
        if self.skipped >= self.warmup:
            self.runtime.synchronize()
            self.seconds += time.perf_counter() - self.mark
        self.mark = time.perf_counter()

    def step(self, samples: torch.Tensor | int, tokens: torch.Tensor | int) -> None:
        """An optimizer step has ended that used `samples` rows and `tokens` tokens of this rank (padding not counted)."""
        if self.skipped < self.warmup:
            self.skipped += 1
            if self.skipped == self.warmup:
                self.runtime.synchronize()
                self.mark = time.perf_counter()
            return
        self.steps += 1
        self.samples = self.samples + samples
        self.tokens = self.tokens + tokens

    def tokens_per_second(self) -> float | None:
        """This rank's rate so far, times the ranks; for display. None during warm-up."""
        seconds = self.seconds + time.perf_counter() - self.mark
        # Cut first: read while pending, a lazy sum is kept as the sum of all its parts, one more each time
        self.runtime.mark_step()
        return float(self.tokens) * self.runtime.world_size / seconds if self.steps and seconds > 0 else None

    def result(self) -> dict[str, float]:
        """Rates over all ranks, after `pause`. Collective. Empty where every step was warm-up."""
        sums = torch.tensor([float(self.samples), float(self.tokens)], dtype=torch.float32)
        if self.runtime.world_size > 1:
            sums = sums.to(self.runtime.device)
            torch.distributed.all_reduce(sums)
        if not self.steps or self.seconds <= 0:
            return {}
        samples, tokens = (sums / self.seconds).tolist()
        return {
            "train_samples_per_second": round(samples, 3),
            "train_steps_per_second": round(self.steps / self.seconds, 3),
            "train_tokens_per_second": round(tokens, 1),
        }


def memory_of_all_ranks(runtime: Runtime) -> dict[str, float]:
    """`Runtime.memory` with the largest figure of all ranks. Collective."""
    own = runtime.memory()
    if runtime.world_size == 1:
        return own
    figures = torch.tensor(list(own.values()), dtype=torch.float32, device=runtime.device)
    torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX)
    return {name: round(value, 2) for name, value in zip(own, figures.tolist(), strict=True)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all; NaN and infinity, which JSON lacks, as null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(clean, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """train_results.json, eval_results.json and all_results.json from one set of figures."""
    train = {k: v for k, v in results.items() if k.startswith("train_") or k in ("epoch", "global_step")}
    evaluation = {k: v for k, v in results.items() if k.startswith(("eval_", "perplexity")) or k == "epoch"}
    memory = {k: v for k, v in results.items() if "(GB)" in k}
    if any(k.startswith("train_") for k in train):
        write_json(folder / "train_results.json", train | memory)
    if "eval_loss" in results:
        write_json(folder / "eval_results.json", evaluation | memory)
    write_json(folder / "all_results.json", results)


def compare_with_baseline(results: dict[str, Any], metrics: dict[str, float], tolerance: dict[str, float]) -> list[str]:
    """A line for each metric that both have: value, baseline, difference, and the verdict where a tolerance is given."""
    lines = []
    for name, expected in metrics.items():
        if not isinstance(found := results.get(name), int | float):
            continue
        line = f"{name}: {found:.6g}, baseline {expected:.6g}, difference {found - expected:+.3g}"
        if name in tolerance:
            within = abs(found - expected) <= tolerance[name]
            line += f" ({'within' if within else 'OUTSIDE'} ±{tolerance[name]:g})"
        lines.append(line)
    return lines
