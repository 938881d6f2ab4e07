"""A plan as one HTML file with its picture inside: live bytes over the ops, by kind."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

COLOURS = {
    "kept for backward": "#2a6f97", "gradients": "#c8553d", "gathered weights": "#e9c46a", "activations": "#9db4c0",
    "optimizer": "#6d597a",
}  # fmt: skip
GIB = 1024**3
POINTS = 1500


def picture(made: Any, name: str) -> bytes:
    """PNG of one plan's curve, over what is there all the time in the traced model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    step = max(1, -(-len(made.curve) // POINTS))
    groups = [made.curve[n : n + step] for n in range(0, len(made.curve), step)]
    # of each group of ops the one with most alive
    points = [max(group, key=lambda kinds: sum(kinds.values())) for group in groups]
    kinds = [kind for kind in COLOURS if any(kind in point for point in points)]
    kinds += sorted({kind for point in points for kind in point} - set(kinds))
    figure, axes = plt.subplots(figsize=(10, 4.2), dpi=110)
    heights = [[point.get(kind, 0) / GIB for point in points] for kind in kinds]
    colours = [COLOURS.get(kind, "#bbbbbb") for kind in kinds]
    axes.stackplot([n * step for n in range(len(points))], heights, labels=kinds, colors=colours, linewidth=0)
    layers = f"{made.traced} of {made.layers} layers traced" if made.traced < made.layers else f"{made.layers} layers"
    axes.set(xlabel="op", ylabel="GiB beside what is there all the time", title=f"{name}: {layers}")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def write(path: Path, title: str, text: str, found: dict[str, Any]) -> None:
    """The report and a picture of each step, in one file that needs nothing else."""
    images = "".join(
        f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(picture(made, name)).decode()}">'
        for name, made in found.items()
    )
    page = (
        '<!doctype html><meta charset="utf-8"><title>Memory plan</title>'
        "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}img{max-width:100%}</style>"
        f"<h1>Memory plan: {html.escape(title)}</h1>{images}<pre>{html.escape(text)}</pre>"
    )
    part = path.with_name(f".{path.name}.part")
    part.write_text(page, encoding="utf-8")
    part.replace(path)
