"""Completions as a JSONL file: a line a prompt, in the order of the prompts, gone on with where a run was cut off."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.pipeline.compose import to_yaml
from recipes.pipeline.config import GenerateRecipe, InputError
from recipes.pipeline.generation import Completion, Generator
from recipes.pipeline.memory_curve import compared, draw, watch_prompt
from recipes.pipeline.metrics import memory_of_all_ranks, write_json
from recipes.pipeline.questions import Question, to_request
from recipes.pipeline.report import versions
from recipes.pipeline.runtime import Runtime

FILE = "completions.jsonl"
WINDOW = 16  # batches between two writes: rows of like length are found inside a window
# Options that change no text
WITHOUT_EFFECT = {
    "prompt", "file", "held_out", "max_prompts", "batch_size", "output", "stream", "tensor_parallel", "length_bucket",
    "prefill_chunk", "stop_check", "fused", "compact",
}  # fmt: skip


@dataclass
class Output:
    """The file of a run: `done` lines are there already."""

    path: Path
    folder: Path
    settings: str  # digest of all that decides the texts but the prompts
    done: int
    stream: bool


def open_output(cfg: GenerateRecipe, runtime: Runtime, folder: Path, asked: list[Question]) -> Output:
    """Find what an earlier run has left, and make the run's folder. Raises InputError for a file of other prompts or settings."""
    path = Path(cfg.generate.output).expanduser() if cfg.generate.output else folder / FILE
    settings = settings_digest(cfg)
    if path.is_dir():
        raise InputError(f"generate.output={path}: is a folder; give the name of a file, as in {path / FILE}")
    done = _finished_lines(path, settings, asked) if path.exists() else 0
    runtime.barrier()  # all have looked before anything is written
    if runtime.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
            write_json(folder / "versions.json", versions(cfg, runtime))
            path.open("a").close()
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}; choose another generate.output") from error
        if done:
            print(f"{path} holds {done:,} of {len(asked):,} completions; going on behind them")
    stream = len(asked) == 1 if cfg.generate.stream is None else cfg.generate.stream
    return Output(path, folder, settings, done, stream and runtime.is_main)


def settings_digest(cfg: GenerateRecipe) -> str:
    """Of model, adapter, template and sampling: two runs with one digest give one text for one prompt."""
    options = {k: v for k, v in dataclasses.asdict(cfg.generate).items() if k not in WITHOUT_EFFECT}
    model = {k: v for k, v in dataclasses.asdict(cfg.model).items() if k != "cache_dir"}
    parts = [model, cfg.adapter.path, cfg.data.template.name, cfg.data.system_prompt, cfg.seed, options]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _finished_lines(path: Path, settings: str, asked: list[Question]) -> int:
    """Whole lines of an earlier run; a last line that was cut short is taken away."""
    content = path.read_bytes()
    lines = content.split(b"\n")[:-1]
    for n, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            same = (found["index"], found["settings"]) == (n - 1, settings)
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path} line {n}: not a completion of this program; choose another generate.output"
            ) from None
        if not same or n > len(asked) or found["prompt"] != asked[n - 1].prompt:
            raise InputError(
                f"{path} line {n} is of another prompt, model or setting; choose another generate.output, or remove the file"
            )
    whole = sum(len(line) + 1 for line in lines)
    if whole < len(content) and os.environ.get("RANK", "0") == "0":
        os.truncate(path, whole)
    return len(lines)


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
    if output.stream and len(asked) == 1:
        generator.on_text = _stream
    size = WINDOW * generator.rows(max((len(q.ids) for q in asked if q.ids), default=1)) * ranks.groups
    silent = not main or output.stream
    with tqdm(total=len(asked), initial=output.done, desc="generating", unit="prompt", disable=silent) as bar:
        generator.on_batch = lambda rows: bar.update(min(rows * ranks.groups, bar.total - bar.n))
        for start in range(output.done, len(asked), size):
            window = asked[start : start + size]
            kept = [n for n, question in enumerate(window) if question.ids is not None]
            done = ranks.gather(generator.run([to_request(window[n]) for n in kept]))
            if main:
                found = {kept[place]: completion for place, completion in done.items()}
                _append(output, start, window, found)
                bar.update(start + len(window) - bar.n)
    results = figures(generator, len(asked) - output.done)
    if main and cfg is not None and cfg.memory_curve and (seen := watch_prompt(generator, cfg)) is not None:
        draw(output.folder, seen)
        results |= seen.results()
    return results


def _append(output: Output, start: int, window: list[Question], found: dict[int, Completion]) -> None:
    lines = []
    for n, question in enumerate(window):
        completion = found.get(n) or Completion("", [], question.tokens, 0, "too_long")
        line = {
            "index": start + n,
            "prompt": question.prompt,
            "text": completion.text,
            "prompt_tokens": completion.prompt_tokens,
            "new_tokens": completion.new_tokens,
            "finish_reason": completion.finish_reason,
            **({"reference": question.reference} if question.reference is not None else {}),
            "settings": output.settings,
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    with output.path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


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
    result["batch_size"] = generator.batch_rows
    return result | memory_of_all_ranks(generator.runtime)


def report(runtime: Runtime, output: Output, results: dict[str, Any]) -> None:
    """Write generation.json and print the summary. Rank 0 only."""
    if not runtime.is_main:
        return
    write_json(output.folder / "generation.json", results)
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
    lines.append(f"completions   {os.path.relpath(output.path)}")
    print("\n".join(lines), flush=True)
