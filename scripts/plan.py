"""What a run will need of a card, before anyone has one.   python scripts/plan.py +experiment=70b

The model's own code is traced without weights; the table gives memory by term, the tensors that make the peak, the verdict for
each kind of card, what each option would change, and the largest batch and sequence. Takes the options of recipes/lora.py, or of
recipes/generate.py where the experiment's name or an option says generate. What is assumed is printed at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from recipes.pipeline import memory_options, memory_plan
from recipes.pipeline.compose import compose_here, exit_on_error
from recipes.pipeline.config import GenerateRecipe, InputError, LoraRecipe
from recipes.pipeline.runtime import GIB
from scripts.arguments import OneLineParser

TOP = 12
Job = tuple[str, Callable[..., Any], tuple]  # name, function, arguments


def main(argv: list[str] | None = None) -> None:
    with exit_on_error():
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.measured:
            from scripts.measured_memory import rows, table

            return print(table(rows()))
        run(options)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="the plan, bytes, for programs")
    parser.add_argument(
        "--compare", nargs="+", metavar="OVERRIDE", help="a second configuration: options on top of the first"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also as one file with a picture of the memory over the ops"
    )
    parser.add_argument("--card", help="the card of the largest batch and sequence; default: the configuration's kind")
    parser.add_argument("--quick", action="store_true", help="no options, no largest batch")
    parser.add_argument(
        "--measured", action="store_true", help="figures measured on cards against their plans, and nothing else"
    )
    parser.add_argument("overrides", nargs="*", help="as for recipes/lora.py: +experiment=70b adapter.r=8 ...")
    options = parser.parse_intermixed_args(argv)
    for one, others in (("measured", ("json", "html", "compare", "card")), ("compare", ("json", "html", "card"))):
        for other in others:
            if getattr(options, one) and getattr(options, other):
                parser.error(f"--{one} prints one table; leave --{other} out")
    if options.json and options.html:
        parser.error("--json or --html, one at a time")
    if options.quick and options.card:
        parser.error("--card is the card of the largest batch, which --quick leaves out")
    return options


def run(options: argparse.Namespace) -> None:
    """Everything but the measured figures."""
    root = root_of(options.overrides + (options.compare or []))
    cfg = compose_here(as_plan(options.overrides, root), root)
    if options.card:
        memory_plan.capacity(options.card)
    if options.html and options.html.is_dir():
        raise InputError(f"--html {options.html}: a folder; give the name of a file")
    if options.html and not options.html.parent.is_dir():
        raise InputError(f"--html {options.html}: no folder {options.html.parent}; make it first")
    if options.compare:
        other = compose_here(as_plan([*options.overrides, *options.compare], root), root)
        step, first = next(iter(memory_plan.plans(cfg, depths=memory_plan.QUICK).items()))
        print(f"{step}, the step that needs most")
        return print(comparison(first, memory_plan.main_plan(other, step), " ".join(options.compare)))
    _load()
    found = memory_plan.plans(cfg)
    extra = {} if options.quick else variations(cfg, card_of(cfg, options.card), found, quiet=options.json)
    if options.json:
        plain = {"plans": {name: made.as_dict() for name, made in found.items()}, **extra}
        plain["cards"] = {
            card: next(iter(found.values())).verdict(size) for card, size in memory_plan.capacities().items()
        }
        return print(json.dumps(plain, indent=2))
    text = report(cfg, found, extra, card_of(cfg, options.card))
    print(text)
    if options.html:
        from scripts.plan_html import write

        write(options.html, " ".join(options.overrides) or "defaults", text, found)
        print(f"\npicture       {options.html}")


def _load() -> None:
    """The libraries. They are most of a plan's time, so nothing looks for garbage meanwhile, and what transformers takes for
    assisted decoding and for object detection stays out where it is not loaded yet."""
    gc.disable()
    kept_out = [name for name in ("sklearn", "scipy") if sys.modules.setdefault(name, None) is None]
    import modeling.memory  # noqa: F401
    import recipes.pipeline.model  # noqa: F401

    for name in kept_out:
        del sys.modules[name]
    gc.freeze()
    gc.enable()


def root_of(overrides: list[str]) -> str:
    """Which recipe's options these are."""
    named = [o.split("=", 1)[1] for o in overrides if o.startswith("+experiment=")]
    options = [o.lstrip("+~") for o in overrides]
    return (
        "generate" if any("generate" in n for n in named) or any(o.startswith("generate.") for o in options) else "lora"
    )


def as_plan(overrides: list[str], root: str) -> list[str]:
    """A plan of generation needs no prompts."""
    return [*overrides, "dry_run=true"] if root == "generate" else overrides


def card_of(cfg: LoraRecipe, asked: str | None) -> str:
    return asked or memory_plan.KIND_CARDS.get(memory_plan.device_kind(cfg), memory_plan.HERE)


def variations(cfg: LoraRecipe, card: str, found: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """What each option changes (bytes of the nominal figure), and the largest rows and tokens on `card`.

    found: the plans of `cfg`.
    """
    room = memory_plan.capacity(card)
    kind, made = next(iter(found.items()))
    plain = memory_options.without(cfg)
    jobs: list[Job] = []
    for name, configured, known in (("with", cfg, made.high), ("without", plain, None)):
        if configured is not None:
            jobs += [
                (f"rows {name}", memory_options.largest_rows, (configured, room, kind, known)),
                (f"length {name}", memory_options.largest_length, (configured, room, kind)),
            ]
    jobs += [(name, _nominal, (other, kind)) for name, other in memory_options.options(cfg)]
    # A fork has the libraries already, but may not follow a backward pass
    start = "fork" if isinstance(cfg, GenerateRecipe) and "fork" in multiprocessing.get_all_start_methods() else "spawn"
    progress = tqdm(
        _on_two_processes(jobs, start), "options", len(jobs), unit="plan", disable=quiet or not sys.stderr.isatty()
    )
    results: dict[str, Any] = dict(progress)
    largest = {
        name: {unit: dataclasses.astuple(results.pop(f"{unit} {name}")) for unit in ("rows", "length")}
        for name in ("with", *(["without"] if plain else []))
    }
    changes = {name: value if isinstance(value, str) else value - made.nominal for name, value in results.items()}
    return {
        "options": changes,
        "largest": {"card": card, **largest},
    }


def _on_two_processes(jobs: list[Job], start: str) -> Iterator[tuple[str, Any]]:
    workers = min(2, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(start)) as pool:
        waiting = [(name, pool.submit(function, *given)) for name, function, given in jobs]
        for name, job in waiting:
            yield name, job.result()


def _nominal(cfg: LoraRecipe, kind: str) -> int | str:
    try:
        return memory_plan.main_plan(cfg, kind).nominal
    except InputError as error:
        return str(error)


def report(cfg: LoraRecipe, found: dict[str, Any], extra: dict[str, Any], card: str) -> str:
    """The plan as text."""
    name, made = next(iter(found.items()))
    work, setting = made.workload, made.setting
    mode = "lazy" if setting.lazy else "op by op"
    zero = "" if setting.zero_stage is None else f", ZeRO-{setting.zero_stage} over {setting.ranks}"
    shared = f", tensor parallel {setting.shared}" if setting.shared > 1 else ""
    lines = [
        f"{name}: {work.rows} rows of {work.length:,} tokens, {made.layers} layers, {cfg.model.dtype.name}; "
        f"{setting.device}, {mode}{zero}{shared}",
        "",
        f"{'there all the time':44} {sum(made.static.values()) / GIB:9.3f} GiB a card",
        *[f"  {term:42} {size / GIB:9.3f}" for term, size in sorted(made.static.items(), key=lambda item: -item[1])],
        f"{'alive at the peak, op by op':44} {sum(made.peak.values()) / GIB:9.3f}",
        *[f"  {kind:42} {size / GIB:9.3f}" for kind, size in sorted(made.peak.items(), key=lambda item: -item[1])],
        f"{'low: op by op, the floor':44} {made.low / GIB:9.3f}",
    ]
    if made.graph:
        lines += [
            f"{'nominal: lazy graphs':44} {made.nominal / GIB:9.3f}",
            f"  {f'persistent (graph ends: {_short(made.graph.cause)})':42} {made.graph.persistent / GIB:9.3f}",
            f"  {f'workspace ({made.graph.count:,} graphs a step)':42} {made.graph.workspace / GIB:9.3f}",
            f"{'high: memory given back late':44} {made.high / GIB:9.3f}",
        ]
    lines += [f"{'held after the step':44} {made.end / GIB:9.3f}", f"the peak: {made.where}", "", "tensors at the peak"]
    for live in made.top[:TOP]:
        lines.append(
            f"  {live.size / GIB:9.3f} GiB  {live.count:3} x {list(live.shape)} {live.dtype}, {live.kind}: {live.op}"
            f"{f' in {live.module}' if live.module else ''}{f' ({live.line})' if live.line else ''}"
        )
    others = [f"{other}: {plan.nominal / GIB:.3f} GiB" for other, plan in list(found.items())[1:]]
    lines += ["", *(["other steps   " + "; ".join(others)] if others else [])]
    for each, size in memory_plan.capacities().items():
        lines.append(
            f"{each:13} {size / GIB:6.1f} GiB: {made.verdict(size)}, {(size - made.nominal) / GIB:+.1f} GiB left"
        )
    if extra:
        lines += ["", "what an option would change, GiB"]
        for option, change in sorted(
            extra["options"].items(), key=lambda item: item[1] if isinstance(item[1], int) else 0
        ):
            lines.append(f"  {option:50} {change if isinstance(change, str) else f'{change / GIB:+9.3f}'}")
        largest = extra["largest"]
        names = {"with": f"largest on {card}", "without": "without graph breaks and in-place add"}
        lines.append("")
        for key, called in names.items():
            if found_there := largest.get(key):
                lines.append(
                    f"{called}: {_said(found_there['rows'], 'rows')}; {_said(found_there['length'], 'tokens a row')}"
                )
    lines += ["", "assumed", *[f"  {key}: {value}" for key, value in made.assumptions.items()]]
    return "\n".join(lines)


def _said(found: tuple, unit: str) -> str:
    value, bound = found
    return f"no {unit} fit" if value is None else f"{value:,} {unit}" + (f" ({bound})" if bound else "")


def _short(cause: str) -> str:
    return cause if len(cause) < 20 else f"{cause[:9]} {cause.rpartition('.')[2]}"


def comparison(first: Any, second: Any, name: str) -> str:
    """Two plans term by term."""
    lines = [f"{'GiB':30} {'first':>10} {'second':>10} {'change':>10}   second: {name}"]

    def line(term: str, a: int, b: int) -> None:
        lines.append(f"{term:30} {a / GIB:10.3f} {b / GIB:10.3f} {(b - a) / GIB:+10.3f}")

    for part in ("static", "peak"):
        one, two = getattr(first, part), getattr(second, part)
        for term in dict.fromkeys([*one, *two]):
            line(term, one.get(term, 0), two.get(term, 0))
    for term in ("low", "nominal", "high", "end"):
        line(term, getattr(first, term), getattr(second, term))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
