"""Completions of all prompts, window by window, into their file; figures and summary of the run."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

from recipes.pipeline.completion_file import Output, append, line_of
from recipes.pipeline.config import GenerateRecipe
from recipes.pipeline.generation import Completion, Generator
from recipes.pipeline.memory_curve import compared, draw, watch_prompt
from recipes.pipeline.metrics import memory_of_all_ranks, write_json
from recipes.pipeline.questions import Question, to_request
from recipes.pipeline.runtime import Runtime

SKIPPED = "too_long"
WINDOW = 16  # batches until lines are in order: rows of like length are found inside a window


def run(
    generator: Generator, asked: list[Question], output: Output, cfg: GenerateRecipe | None = None
) -> dict[str, Any]:
    """Generate what is missing, window by window; figures of the run. Collective.

    cfg: a prompt's memory is recorded beside its plan, if it asks for that.
    """
    ranks, main = generator.ranks, generator.runtime.is_main
    if main and len(asked) < ranks.groups:
        print(
            f"{len(asked)} prompt(s) for {ranks.groups} ranks: {ranks.groups - len(asked)} have nothing to do",
            file=sys.stderr,
        )
    if output.stream:
        generator.on_text = _stream
    size = WINDOW * generator.rows(max((len(q.ids) for q in asked if q.ids), default=1)) * ranks.groups
    silent = not main or output.stream
    known = output.done + sum(n >= output.done for n in output.found)
    with tqdm(total=len(asked), initial=known, desc="generating", unit="prompt", disable=silent) as bar:
        for start in range(output.done, len(asked), size):
            places = range(start, min(start + size, len(asked)))
            wanted = [n for n in places if asked[n].ids is not None and n not in output.found]

            def keep(done: dict[int, Completion], wanted: list[int] = wanted) -> None:
                lines = [line_of(output, wanted[place], asked, completion) for place, completion in done.items()]
                append(output.part(generator.runtime.rank), lines)
                bar.update(min(len(lines) * ranks.groups, bar.total - bar.n))

            generator.on_batch = keep if len(places) > 1 else None
            done = ranks.gather(generator.run([to_request(asked[n]) for n in wanted]))
            if main:
                lines = {n: output.found[n] for n in places if n in output.found}
                lines |= {wanted[place]: line_of(output, wanted[place], asked, one) for place, one in done.items()}
                skipped = [n for n in places if asked[n].ids is None]
                lines |= {
                    n: line_of(output, n, asked, Completion("", [], asked[n].tokens, 0, SKIPPED)) for n in skipped
                }
                append(output.path, [lines[n] for n in places])
                bar.update(max(0, places.stop - bar.n))
    if main:
        for part in output.parts():
            part.unlink()
    results = figures(generator, len(asked) - known)
    if main and cfg is not None and cfg.memory_curve and (seen := watch_prompt(generator, cfg)) is not None:
        draw(output.folder, seen)
        results |= seen.results()
    return results


def _stream(place: int, text: str, ended: bool) -> None:
    print(text, end="\n" if ended else "", flush=True)


def figures(generator: Generator, prompts: int) -> dict[str, Any]:
    """Rates over all ranks, time to the first token, memory. Collective."""
    parts = generator.ranks.gather({generator.runtime.rank: generator.speed})
    speeds = list(parts.values())
    shared = generator.options.tensor_parallel
    result: dict[str, Any] = {"prompts": prompts}
    for name in ("prefill", "decode"):
        tokens = sum(getattr(speed, f"{name}_tokens") for speed in speeds) // shared
        seconds = max(getattr(speed, f"{name}_seconds") for speed in speeds)
        result[f"{name}_tokens"], result[f"{name}_seconds"] = tokens, round(seconds, 3)
        result[f"{name}_tokens_per_second"] = round(tokens / seconds, 1) if seconds else None
    first = [speed.first_token_seconds for speed in speeds if speed.first_token_seconds is not None]
    result["time_to_first_token"] = round(min(first), 4) if first else None
    result["batch_size"] = generator.batch_rows and min(generator.batch_rows, prompts)
    return result | memory_of_all_ranks(generator.runtime)


def report(runtime: Runtime, output: Output, results: dict[str, Any]) -> None:
    """Write generation.json and print the summary. Rank 0 only."""
    if not runtime.is_main:
        return
    if not results["prompts"]:
        return print(f"completions   {os.path.relpath(output.path)}: all were there", flush=True)
    write_json(output.folder / "generation.json", {"adapter": output.adapter, **results})
    lines = [""]
    for name in ("prefill", "decode"):
        rate = results[f"{name}_tokens_per_second"]
        if rate is not None:
            tokens, seconds = results[f"{name}_tokens"], results[f"{name}_seconds"]
            lines.append(f"{name:<14}{tokens:,} tokens in {seconds:.2f} s, {rate:,.1f} tokens/s")
    if results["time_to_first_token"] is not None:
        lines.append(
            f"first token   {1000 * results['time_to_first_token']:.0f} ms, {results['batch_size']} row(s) a batch"
        )
    lines.append(f"peak memory   {results['max_memory_allocated (GB)']:g} GiB")
    lines += compared(results)
    lines += [f"adapter       {output.adapter or 'none'}", f"completions   {os.path.relpath(output.path)}"]
    print("\n".join(lines), flush=True)
