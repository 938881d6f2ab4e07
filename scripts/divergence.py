"""Where two runs part: the first tensor of their traces that differs, else the first step, else the evaluation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.pipeline.trace import RANDOM, TRACE_FILE

if TYPE_CHECKING:
    from scripts.comparison import Comparison


class Divergence(NamedTuple):
    where: str  # "step 1, forward, model.layers.3.self_attn.q_proj"
    relative: float | None  # size of the difference against the tensor's own; None: another kind of difference


def first_divergence(comparison: Comparison, tolerance: float) -> Divergence | None:
    """`tolerance`: relative, of a tensor's fingerprint. None where nothing differs."""
    found, baseline = (_trace(result.folder) for result in (comparison.found, comparison.baseline))
    if (tensor := _first_tensor(found, baseline, tolerance)) is not None:
        return _random(tensor, found, baseline) if "dropout" in tensor.where else tensor
    steps = [row for row in comparison.rows if row.metric in ("step_loss", "grad_norm") and not row.ok]
    if steps:
        first = min(int(row.at.rsplit("step ", 1)[1]) for row in steps)
        return Divergence(f"step {first}, {' and '.join(row.metric for row in steps)}", None)
    wrong = [row.metric for row in comparison.rows if not row.ok]
    if wrong and all(name.startswith(("eval_", "perplexity")) for name in wrong):
        return Divergence(f"evaluation ({', '.join(wrong)}); training is the same", None)
    return Divergence(", ".join(wrong), None) if wrong else None


def _random(tensor: Divergence, found: dict, baseline: dict) -> Divergence:
    """What dropout lets through differs and its input does not: other random numbers. Since when?"""
    states = [{key: entry["print"] for key, entry in trace.items() if key[1] == RANDOM} for trace in (found, baseline)]
    moved = sorted(key[0] for key in states[0].keys() & states[1].keys() if states[0][key] != states[1][key])
    since = {0: "random state before step 0", 1: "step 0, evaluation: it draws random numbers"}.get(
        moved[0] if moved else None
    )
    return Divergence(f"{since}; then {tensor.where}" if since else f"{tensor.where}: random numbers", tensor.relative)


def first_step(found: Path | None, baseline: Path | None) -> tuple[float, str] | None:
    """(largest relative difference, place) of the first step's outputs and gradients; None without two traces.

    Not of its updates: there AdamW turns a gradient's rounding around zero into a whole step."""
    ours, theirs = _trace(found), _trace(baseline)
    keys = [key for key in theirs if key in ours and key[0] == 1 and key[1] in ("forward", "gradient")]
    same = [key for key in keys if ours[key]["shape"] == theirs[key]["shape"]]
    return max(((_apart(ours[key], theirs[key]), _place(key)) for key in same), default=None)


def curve(found: Path | None, baseline: Path | None) -> list[tuple[str, float]]:
    """(place, relative difference) of every tensor that both traces have, in order."""
    ours = _trace(found)
    return [
        (_place(key), _apart(ours[key], entry))
        for key, entry in _trace(baseline).items()
        if key in ours and key[1] != RANDOM
    ]


def _trace(folder: Path | None) -> dict[tuple, dict[str, Any]]:
    if folder is None or not (folder / TRACE_FILE).exists():
        return {}
    seen: Counter = Counter()
    entries: dict[tuple, dict[str, Any]] = {}
    for line in (folder / TRACE_FILE).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        key = (entry["step"], entry["phase"], entry["name"])
        seen[key] += 1
        entries[(*key, seen[key])] = entry
    return entries


def _first_tensor(found: dict, baseline: dict, tolerance: float) -> Divergence | None:
    for key, entry in baseline.items():
        if key[1] == RANDOM:
            continue
        if key not in found:
            if found and key[1] == "gradient":  # modules may differ between implementations, trained weights may not
                return Divergence(f"{_place(key)}: no gradient", None)
            continue
        if found[key]["shape"] != entry["shape"]:
            return Divergence(f"{_place(key)}: shape {found[key]['shape']} against {entry['shape']}", None)
        if (apart := _apart(found[key], entry)) > tolerance:
            return Divergence(_place(key), apart)
    return None


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of the sums, against the sum of absolute values."""
    size = max(other["print"][1], 1e-12)
    return max(abs(a - b) for a, b in zip(one["print"], other["print"], strict=True)) / size


def _place(key: tuple) -> str:
    step, phase, name, call = key
    return f"step {step}, {phase}, {name}" + (f" (call {call})" if call > 1 else "")
