"""The file of completions: a line a prompt in the order of the prompts, what an earlier run has left of it, and what it may hold.

A stopped run leaves whole lines there, and beside it each rank's finished batches whose turn had not come (`.NAME.RANK.part`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.pipeline.adapter import adapter_folder
from recipes.pipeline.compose import to_yaml
from recipes.pipeline.config import GenerateRecipe, InputError
from recipes.pipeline.generation import Completion
from recipes.pipeline.metrics import write_json
from recipes.pipeline.questions import Question
from recipes.pipeline.report import versions
from recipes.pipeline.runtime import Runtime

FILE = "completions.jsonl"
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

    def part(self, rank: int) -> Path:
        """Lines of one rank's finished batches, kept until their turn comes."""
        return self.path.with_name(f".{self.path.name}.{rank}.part")

    def parts(self) -> list[Path]:
        """Of all ranks, those of an earlier run included."""
        return sorted(self.path.parent.glob(glob.escape(f".{self.path.name}.") + "*.part"))


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
    for file in output.parts():
        output.found |= _finished_batches(file, keys)
    runtime.barrier()  # all have looked before anything is written
    return output


def begin(cfg: GenerateRecipe, runtime: Runtime, output: Output) -> None:
    """Make the run's folder and file, before any rank writes there. Collective."""
    if runtime.is_main:
        _make(cfg, runtime, output)
    runtime.barrier()


def _make(cfg: GenerateRecipe, runtime: Runtime, output: Output) -> None:
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


def line_of(output: Output, index: int, asked: list[Question], completion: Completion) -> dict[str, Any]:
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


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
