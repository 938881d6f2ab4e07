"""Two results, metric by metric: comparable at all? the same? Tolerances and their reasons: conf/parity.yaml."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from recipes.pipeline.compose import REPOSITORY
from recipes.pipeline.config import InputError
from scripts import divergence
from scripts.results import PERPLEXITY_OFF, Result

# Which settings widen the tolerance, narrowest class first. What is not here and differs makes runs that may differ.
CLASSES = {
    "ranks": ("versions.world_size", "deepspeed.", "train.gradient_accumulation_steps", "train.per_device_train_batch_size"),
    "kernel": (
        "runtime.", "train.gradient_checkpointing", "model.implementation", "versions.device", "versions.torch",
        "versions.machine", "versions.cpu", "data.padding_side", "data.pad_to", "data.batching",
    ),
    "dtype": ("model.dtype", "adapter.dtype", "runtime.attn_softmax_bf16"),
}  # fmt: skip
ORDER = ("same", *CLASSES)


class Verdict(IntEnum):
    """Exit statuses."""

    SAME = 0
    DIFFERS = 1
    NOT_COMPARABLE = 2


@dataclass
class Row:
    metric: str
    found: float
    baseline: float
    tolerance: float | None  # None: reported only
    ok: bool
    at: str = ""  # where the largest difference is, for series

    @property
    def difference(self) -> float:
        return self.found - self.baseline


@dataclass
class Comparison:
    found: Result
    baseline: Result
    rows: list[Row] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # settings: (baseline's, found)
    kind: str = "same"  # which tolerances
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.refusals:
            return Verdict.NOT_COMPARABLE
        return Verdict.SAME if all(row.ok for row in self.rows) else Verdict.DIFFERS


@lru_cache
def rules() -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "parity.yaml"))


def check_names(names: list[str], known: list[str], option: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise InputError(f"{option} {name}: unknown; {'near' if near else 'there is'} {', '.join(near or known)}")


def compare(found: Result, baseline: Result, require: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> Comparison:
    """`require`: memory, speed decide too. `allow`: facts that may differ, and metrics that may differ or be missing."""
    check_names(list(allow), sorted({*found.facts, *baseline.facts, *rules()["metrics"]}), "--allow")
    comparison = Comparison(found, baseline)
    comparison.changed = _changed(found.settings, baseline.settings)
    comparison.kind = _kind(comparison.changed)
    comparison.reason = rules()["tolerances"][comparison.kind]["reason"]
    _refuse(comparison, allow)
    limits = {**rules()["tolerances"]["same"], **rules()["tolerances"][comparison.kind], **baseline.tolerance}
    for name, rule in rules()["metrics"].items():
        if name not in limits and rule.get("follows") in limits and name in baseline.metrics:
            limits[name] = math.expm1(limits[rule["follows"]]) * abs(baseline.metrics[name])
    limits |= dict.fromkeys(set(allow) & rules()["metrics"].keys())
    for name, rule in rules()["metrics"].items():
        if name in ("step_loss", "grad_norm"):
            comparison.rows += _series(name, found, baseline, limits.get(name))
        elif name == "first_step_tensors":
            comparison.rows += _tensors(found, baseline, limits.get(name))
        elif name in found.metrics and name in baseline.metrics:
            comparison.rows.append(_row(name, rule, found, baseline, limits.get(name), require))
    return comparison


def _changed(found: dict[str, Any], baseline: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [key for key in baseline if key in found and baseline[key] != found[key]]
    return {key: (baseline[key], found[key]) for key in keys}


def _kind(changed: dict[str, Any]) -> str:
    kinds = {name for name, starts in CLASSES.items() for key in changed if key.startswith(starts)}
    return max(kinds, key=ORDER.index, default="same")


def _refuse(comparison: Comparison, allow: tuple[str, ...]) -> None:
    found, baseline = comparison.found, comparison.baseline
    for key in sorted(found.facts.keys() & baseline.facts.keys()):
        ours, theirs = found.facts[key], baseline.facts[key]
        same = math.isclose(ours, theirs, rel_tol=1e-3) if key == "epoch" else ours == theirs
        if same:
            continue
        line = f"{key}: {_short(ours)} against {_short(theirs)}"
        (comparison.allowed if key in allow else comparison.refusals).append(line)
    for result in (found, baseline):
        for key in ("eval_loss", "perplexity"):
            if key not in result.metrics and key not in allow:
                comparison.refusals.append(f"{result.name}: no {key}")
        for key, value in result.metrics.items():
            if key in rules()["metrics"] and not math.isfinite(value):
                comparison.refusals.append(f"{result.name}: {key} is {value}")
        loss, perplexity = (result.metrics.get(key, math.nan) for key in ("eval_loss", "perplexity"))
        if math.isfinite(loss) and math.isfinite(perplexity):
            expected = math.exp(min(loss, 700))
            if not math.isclose(perplexity, expected, rel_tol=PERPLEXITY_OFF):
                comparison.refusals.append(
                    f"{result.name}: perplexity {perplexity:.6g} is not exp({loss:.6g}) = {expected:.6g}"
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:10]}…"


def _row(name: str, rule: dict, found: Result, baseline: Result, limit: float | None, require: tuple[str, ...]) -> Row:
    ours, theirs = found.metrics[name], baseline.metrics[name]
    needs = rule.get("needs")
    if needs in require:
        limit = rules()["relative"][needs] * abs(theirs)
    elif not rule["decides"]:
        return Row(name, ours, theirs, None, True)
    if limit is None:
        return Row(name, ours, theirs, None, True)
    return Row(name, ours, theirs, limit, abs(ours - theirs) <= limit)


def _tensors(found: Result, baseline: Result, limit: float | None) -> list[Row]:
    if limit is None or (seen := divergence.first_step(found.folder, baseline.folder)) is None:
        return []
    apart, place = seen
    return [Row("first_step_tensors", apart, 0.0, limit, apart <= limit, place.removeprefix("step 1, "))]


def _series(name: str, found: Result, baseline: Result, limit: float | None) -> list[Row]:
    key = "loss" if name == "step_loss" else name
    steps = [
        s
        for s in sorted(found.steps.keys() & baseline.steps.keys())
        if key in found.steps[s] and key in baseline.steps[s]
    ]
    if not steps or limit is None:
        return []

    def apart(step: int) -> float:
        ours, theirs = found.steps[step][key], baseline.steps[step][key]
        gap = abs(ours - theirs) / (max(abs(theirs), 1e-12) if name == "grad_norm" else 1.0)
        return gap if math.isfinite(gap) else math.inf

    worst = max(steps, key=apart)
    first = next((step for step in steps if apart(step) > limit), None)
    where = f"step {worst} of {len(steps)}" + (f", first outside at step {first}" if first is not None else "")
    return [Row(name, found.steps[worst][key], baseline.steps[worst][key], limit, first is None, where)]
