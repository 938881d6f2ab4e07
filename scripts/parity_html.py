"""report.html of an A/B comparison: one file, with its pictures inside. Also parity.png, the curves alone."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scripts.comparison import Verdict
from scripts.divergence import curve
from scripts.parity_report import WORDS

COLORS = {Verdict.SAME: "#1a7f37", Verdict.DIFFERS: "#b42318", Verdict.NOT_COMPARABLE: "#9a6700"}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#1f2328}"
    "pre{background:#f6f8fa;padding:1em;overflow-x:auto;font-size:13px}img{max-width:100%}"
    ".verdict{color:#fff;padding:.5em 1em;border-radius:6px;font-size:1.4em;font-weight:600}"
    "table{border-collapse:collapse}td,th{border:1px solid #d0d7de;padding:.3em .7em;text-align:left}"
)


def write_report(folder: Path, arms: list[Any], outcomes: list[Any], verdict: Verdict, text: str) -> None:
    """Curves on top of each other, their difference, divergence tensor by tensor, time and memory, configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    finished = [arm for arm in arms if arm.runs]
    parts = [f'<p class="verdict" style="background:{COLORS[verdict]}">{WORDS[verdict]}</p>']
    if len(finished) > 1:
        figure = _curves(finished, verdict)
        figure.savefig(folder / "parity.png", dpi=110)
        parts += ["<h2>Loss</h2>", _image(figure)]
    for outcome in outcomes:
        if outcome.comparison is not None and (places := curve(outcome.arm.runs[0].folder, finished[0].runs[0].folder)):
            title = f"<h2>Divergence, tensor by tensor: {html.escape(outcome.arm.name)}</h2>"
            parts += [title, _image(_divergence(places)), _largest(places)]
    if finished:
        parts += ["<h2>Time and memory</h2>", _image(_resources(finished))]
    parts += ["<h2>Figures</h2>", f"<pre>{html.escape(text)}</pre>"]
    body = "\n".join(parts)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Parity</title><style>{STYLE}</style><h1>Parity</h1>{body}</html>'
    (folder / "report.html").write_text(page, encoding="utf-8")


def _series(arm: Any, key: str) -> tuple[list[int], list[float]]:
    steps = [(step, record[key]) for step, record in sorted(arm.runs[0].steps.items()) if key in record]
    return [step for step, _ in steps], [value for _, value in steps]


def _curves(arms: list[Any], verdict: Verdict) -> Any:
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 2], layout="constrained")
    first = dict(zip(*_series(arms[0], "loss"), strict=True))
    for number, arm in enumerate(arms):
        steps, losses = _series(arm, "loss")
        style = "-" if number == 0 else (0, (4, 2 + number))
        upper.plot(steps, losses, linestyle=style, linewidth=2.2 - 0.4 * min(number, 3), label=arm.name)
        at, evaluated = _series(arm, "eval_loss")
        upper.plot(
            at, evaluated, "o", markersize=7 - 2 * min(number, 2), fillstyle="none", color=upper.lines[-1].get_color()
        )
        if number:
            gaps = [loss - first[step] for step, loss in zip(steps, losses, strict=True) if step in first]
            lower.plot([step for step in steps if step in first], gaps, color=upper.lines[-1].get_color(), marker=".")
    upper.set(ylabel="loss, nats a target (o: evaluation)", title=f"{WORDS[verdict]}: loss of the arms")
    upper.legend(fontsize=8)
    lower.axhline(0, color="#888", linewidth=0.8)
    lower.set(xlabel="optimizer step", ylabel="difference to the first")
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return figure


def _divergence(places: list[tuple[str, float]]) -> Any:
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    colors = {"forward": "#0969da", "gradient": "#cf222e", "update": "#1a7f37"}
    for phase, color in colors.items():
        points = [(n, max(size, 1e-18)) for n, (place, size) in enumerate(places) if f", {phase}, " in place]
        if points:
            axes.semilogy(*zip(*points, strict=True), ".", color=color, label=phase, markersize=4)
    axes.set(xlabel="tensor, in the order of the run", ylabel="relative difference")
    axes.legend(fontsize=8)
    return figure


def _largest(places: list[tuple[str, float]]) -> str:
    worst = sorted(places, key=lambda item: -item[1])[:8]
    rows = "".join(f"<tr><td>{html.escape(place)}</td><td>{size:.1e}</td></tr>" for place, size in worst)
    return f"<table><tr><th>largest differences</th><th>relative</th></tr>{rows}</table>"


def _resources(arms: list[Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.8 + 0.5 * len(arms)), layout="constrained")
    for axis, key, title in zip(
        axes, ("train_runtime", "max_memory_allocated (GB)"), ("training, s", "peak memory, GiB"), strict=True
    ):
        values = [[run.metrics.get(key, 0.0) for run in arm.runs] for arm in arms]
        means = [sum(runs) / len(runs) for runs in values]
        spread = [[mean - min(runs) for mean, runs in zip(means, values, strict=True)],
                  [max(runs) - mean for mean, runs in zip(means, values, strict=True)]]  # fmt: skip
        axis.barh(range(len(arms)), means, xerr=spread, color="#8250df", height=0.5)
        axis.set_yticks(
            range(len(arms)), [arm.name if len(arm.name) < 40 else f"arm {n}" for n, arm in enumerate(arms)]
        )
        axis.tick_params(labelsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
    axes[1].set_yticks([])
    return figure


def _image(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
