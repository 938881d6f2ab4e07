"""Completions as a JSONL file: a line a prompt, in the order of the prompts, gone on with where a run was cut off."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.pipeline.adapter import adapter_folder
from recipes.pipeline.compose import to_yaml
from recipes.pipeline.config import GenerateRecipe, InputError
from recipes.pipeline.generation import Completion, Generator
from recipes.pipeline.memory_curve import compared, draw, watch_prompt
from recipes.pipeline.metrics import memory_of_all_ranks, write_json
from recipes.pipeline.questions import Question, to_request
from recipes.pipeline.report import versions
from recipes.pipeline.runtime import Runtime

FILE = "completions.jsonl"
SKIPPED = "too_long"
WINDOW = 16  # batches until lines are in order: rows of like length are found inside a window
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
    keys: list[str]  # digest of all that decides a prompt's text, by prompt
    done: int
    stream: bool
    adapter: str | None = None  # its folder
    found: dict[int, dict[str, Any]] = field(default_factory=dict)  # lines of finished batches behind `done`
    shorten: int | None = None  # bytes that stay of a file whose last line was cut short

    def part(self, rank: int | str) -> Path:
        """Lines of one rank's finished batches, kept until their turn comes; `*`: all ranks'."""
        return self.path.with_name(f".{self.path.name}.{rank}.part")


def find_output(cfg: GenerateRecipe, runtime: Runtime, folder: Path, asked: list[Question]) -> Output:
    """What an earlier run has left; nothing is written. Raises InputError for a file of other prompts or settings."""
    path = Path(cfg.generate.output).expanduser() if cfg.generate.output else folder / FILE
    if path.is_dir():
        raise InputError(f"generate.output={path}: is a folder; give the name of a file, as in {path / FILE}")
    if cfg.generate.stream and len(asked) > 1:
        raise InputError(f"generate.stream=true shows the text of one prompt, {len(asked)} are given; leave it out")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"generate.output={path}: {there} is no folder to write to; choose another generate.output")
    settings = settings_digest(cfg)
    keys = [_key(settings, question, cfg.generate.temperature > 0) for question in asked]
    stream = len(asked) == 1 if cfg.generate.stream is None else cfg.generate.stream
    adapter = str(adapter_folder(cfg.adapter.path)) if cfg.adapter.path else None
    output = Output(path, folder, keys, 0, stream and runtime.is_main, adapter)
    if path.exists():
        _finished_lines(output)
    for file in sorted(path.parent.glob(glob.escape(f".{path.name}.") + "*.part")):
        output.found |= _finished_batches(file, keys)
    runtime.barrier()  # all have looked before anything is written
    return output


def begin(cfg: GenerateRecipe, runtime: Runtime, output: Output) -> None:
    """Make the run's folder and file. Rank 0 only."""
    if not runtime.is_main:
        return
    try:
        output.folder.mkdir(parents=True, exist_ok=True)
        output.path.parent.mkdir(parents=True, exist_ok=True)
        (output.folder / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
        write_json(output.folder / "versions.json", versions(cfg, runtime))
        output.path.open("a").close()
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; choose another generate.output") from error
    if output.shorten is not None:
        os.truncate(output.path, output.shorten)
    if known := output.done + sum(n >= output.done for n in output.found):
        print(f"{output.path} holds {known:,} of {len(output.keys):,} completions; going on behind them")


def settings_digest(cfg: GenerateRecipe) -> str:
    """Of model, adapter, template and sampling: two runs with one digest give one text for one prompt."""
    options = {k: v for k, v in dataclasses.asdict(cfg.generate).items() if k not in WITHOUT_EFFECT}
    model = {k: v for k, v in dataclasses.asdict(cfg.model).items() if k != "cache_dir"}
    files = sorted(adapter_folder(cfg.adapter.path).glob("adapter_*")) if cfg.adapter.path else []
    adapter = {file.name: _content(file) for file in files}
    parts = [model, adapter, cfg.data.template.name, cfg.data.system_prompt, cfg.seed, options]
    return _digest(parts)


def _content(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def _key(settings: str, question: Question, drawn: bool) -> str:
    return _digest([settings, question.prompt, question.ids, question.seed if drawn else None])


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _finished_lines(output: Output) -> None:
    """Count whole lines of an earlier run; a last line of ours that was cut short will be taken away."""
    content = output.path.read_bytes()
    *lines, rest = content.split(b"\n")
    for n, line in enumerate(lines):
        try:
            found = json.loads(line)
            index, key = found["index"], found["settings"]
        except (ValueError, KeyError, TypeError):
            raise _foreign(output.path, n) from None
        if index != n or n >= len(output.keys) or key != output.keys[n]:
            raise InputError(
                f"{output.path} line {n + 1} is of another prompt, model or setting; choose another generate.output, or"
                " remove the file"
            )
    begun = f'{{"index": {len(lines)}, "prompt": '.encode()
    if not (rest.startswith(begun) or begun.startswith(rest)):
        raise _foreign(output.path, len(lines))
    output.done = len(lines)
    if rest:
        output.shorten = len(content) - len(rest)


def _foreign(path: Path, line: int) -> InputError:
    return InputError(f"{path} line {line + 1}: not a completion of this program; choose another generate.output")


def _finished_batches(file: Path, keys: list[str]) -> dict[int, dict[str, Any]]:
    """Lines by prompt; those of other prompts or settings, and one that was cut short, are none."""
    found = {}
    for line in file.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            known = json.loads(line)
            if 0 <= known["index"] < len(keys) and known["settings"] == keys[known["index"]]:
                found[known["index"]] = known
    return found


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
    known = output.done + sum(n >= output.done for n in output.found)
    with tqdm(total=len(asked), initial=known, desc="generating", unit="prompt", disable=silent) as bar:
        for start in range(output.done, len(asked), size):
            places = range(start, min(start + size, len(asked)))
            wanted = [n for n in places if asked[n].ids is not None and n not in output.found]

            def keep(done: dict[int, Completion], wanted: list[int] = wanted) -> None:
                lines = [_line(output, wanted[place], asked, completion) for place, completion in done.items()]
                _append(output.part(generator.runtime.rank), lines)
                bar.update(min(len(lines) * ranks.groups, bar.total - bar.n))

            generator.on_batch = keep if len(places) > 1 else None
            done = ranks.gather(generator.run([to_request(asked[n]) for n in wanted]))
            if main:
                lines = {n: output.found[n] for n in places if n in output.found}
                lines |= {wanted[place]: _line(output, wanted[place], asked, one) for place, one in done.items()}
                skipped = [n for n in places if asked[n].ids is None]
                lines |= {n: _line(output, n, asked, Completion("", [], asked[n].tokens, 0, SKIPPED)) for n in skipped}
                _append(output.path, [lines[n] for n in places])
                bar.update(max(0, places.stop - bar.n))
    if main:
        for part in output.path.parent.glob(glob.escape(f".{output.path.name}.") + "*.part"):
            part.unlink()
    results = figures(generator, len(asked) - known)
    if main and cfg is not None and cfg.memory_curve and (seen := watch_prompt(generator, cfg)) is not None:
        draw(output.folder, seen)
        results |= seen.results()
    return results


def _line(output: Output, index: int, asked: list[Question], completion: Completion) -> dict[str, Any]:
    question = asked[index]
    return {
        "index": index,
        "prompt": question.prompt,
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": completion.new_tokens,
        "finish_reason": completion.finish_reason,
        **({"reference": question.reference} if question.reference is not None else {}),
        "settings": output.keys[index],
    }


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
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
