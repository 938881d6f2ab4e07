"""Generation here against transformers' own generate, as one Markdown table.   python scripts/bench_generate.py

SmolLM2-135M-Instruct in float32, 128 new tokens, greedy, prompts of the repository's records in the Alpaca template. Both
decode the same prompts in turn; a row's ratio is the median over the pairs. transformers runs with its best cache of
dynamic and static, chosen by a short run first. Decode time is that of the 127 tokens behind the first, prefill the time up
to the first. Peak memory is each one's own process: resident bytes at the end of a run of the largest batch.
--profile adds where a decoding step's time goes, by torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.autograd.profiler_util import FunctionEvent
from tqdm import tqdm
from transformers import LlamaForCausalLM as StockLlama
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from recipes.pipeline.compose import compose_here, exit_on_error
from recipes.pipeline.config import GenerateConfig, GenerateRecipe
from recipes.pipeline.generation import Generator, Request, Speed
from recipes.pipeline.model import load_tokenizer, load_weights
from recipes.pipeline.prompts import encode_prompt
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.weights import locate

REPOSITORY = Path(__file__).resolve().parents[1]
CPU = Runtime("cpu", lazy=False)
CACHES = ("dynamic", "static")  # of transformers
# Names of torch's ops by what they are for; the rest is element-wise
KINDS = {
    "products with weights": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"),
    "attention": ("softmax", "scaled_dot_product", "flash_attention"),
    "copies and joins": ("copy", "cat", "index", "clone", "contiguous", "repeat", "fill", "zero"),
}
PROFILED = 16  # decoding steps
MODELS = ("model=smollm2_135m", "model.dtype=float32", "dry_run=true")


@dataclass
class Timing:
    prefill: float  # seconds
    decode: float
    ids: list[list[int]]  # new ones, row by row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs of each batch size")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's own choice")
    parser.add_argument("--profile", action="store_true", help="also the time of a decoding step by kind of op")
    parser.add_argument("--memory-of", choices=["ours", *CACHES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with exit_on_error():
        cfg = compose_here([*MODELS], "generate")
        if options.memory_of:
            return print(json.dumps(memory(cfg, options.memory_of, options.batches[0], options.tokens)))
        print(table(cfg, options))


def table(cfg: GenerateRecipe, options: argparse.Namespace) -> str:
    """All comparisons as Markdown; a progress bar meanwhile."""
    tokenizer = load_tokenizer(cfg.model)
    stock, ours = load_stock(cfg), load_weights(cfg, tokenizer).eval()
    rows = ["| | transformers' generate | this project's | ratio |", "|---|---|---|---|"]
    profiles: list[str] = []
    with tqdm(total=len(options.batches) * (options.pairs + 1) + 2, desc="measuring", unit="run") as bar:
        for batch in sorted(options.batches):
            prompts = prompts_of(cfg, tokenizer, batch)
            cache = best_cache(stock, prompts)
            bar.update()
            pairs = []
            for _ in range(options.pairs):
                pairs.append(
                    (of_stock(stock, prompts, options.tokens, cache), of_ours(ours, tokenizer, prompts, options.tokens))
                )
                bar.update()
            rows += rows_of(batch, options.tokens, cache, pairs)
            if options.profile:
                profiles += profile_rows(batch, *steps_by_kind(stock, ours, tokenizer, prompts, cache))
        peaks = []
        for which in (cache, "ours"):  # of the largest batch
            peaks.append(memory_elsewhere(which, max(options.batches), options))
            bar.update()
    rows.append(
        f"| peak resident memory, batch {max(options.batches)}, GiB | {peaks[0]:.2f} | {peaks[1]:.2f} | {peaks[1] / peaks[0]:.2f} |"
    )
    return "\n".join(
        [
            *rows,
            *profiles,
            "",
            f"{torch.get_num_threads()} CPU threads, {options.pairs} pairs, float32, {options.tokens} new tokens.",
        ]
    )


def rows_of(batch: int, tokens: int, cache: str, pairs: list[tuple[Timing, Timing]]) -> list[str]:
    """Rates (tokens/s) from each side's median time; the ratio is the median of the pairs' own."""
    rows = []
    same = all(stock.ids == ours.ids for stock, ours in pairs)
    counts = {"prefill": None, "decode": batch * (tokens - 1)}
    for what in ("decode", "prefill"):
        times = [[getattr(timing, what) for timing in side] for side in zip(*pairs, strict=True)]
        ratio = statistics.median(one / other for one, other in zip(*times, strict=True))
        medians = [statistics.median(side) for side in times]
        if counts[what]:
            cells = " | ".join(f"{counts[what] / seconds:.1f} tokens/s" for seconds in medians)
            rows.append(
                f"| decode, batch {batch} ({cache} cache; ids {'equal' if same else 'DIFFER'}) | {cells} | {ratio:.2f} |"
            )
        else:
            cells = " | ".join(f"{1000 * seconds:.0f} ms" for seconds in medians)
            rows.append(f"| prefill, batch {batch} | {cells} | {ratio:.2f} |")
    return rows


def load_stock(cfg: GenerateRecipe) -> StockLlama:
    """transformers' Llama, loaded by transformers."""
    return StockLlama.from_pretrained(locate(cfg.model.name_or_path, cfg.model), torch_dtype=torch.float32).eval()


def prompts_of(cfg: GenerateRecipe, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Ids of the first `count` records with an input; in a batch they differ in length."""
    lines = (REPOSITORY / "conf" / "data" / "smoke.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["input"]][:count]
    return [encode_prompt(record, cfg.data, tokenizer) for record in records]


class Clock(LogitsProcessor):
    """Notes when the first token's scores are there; changes nothing."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return scores


def of_stock(model: StockLlama, prompts: list[list[int]], tokens: int, cache: str) -> Timing:
    """One run of transformers' generate on a left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    kind: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    clock = Clock()
    began = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        logits_processor=[clock], **kind,
    )  # fmt: skip
    ended = time.perf_counter()
    return Timing(clock.first - began, ended - clock.first, out[:, width:].tolist())


def of_ours(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], tokens: int
) -> Timing:
    """One run of this project's loop, its cache kept from the run before as between batches."""
    rows = len(prompts)
    if (generator := _generators.get(rows)) is None:
        options = GenerateConfig(max_new_tokens=tokens, ignore_eos=True, batch_size=rows)
        generator = _generators[rows] = Generator(model, tokenizer, options, CPU, [])
    generator.speed = Speed()
    done = generator.run([Request(prompt, 0) for prompt in prompts])
    speed = generator.speed
    return Timing(speed.prefill_seconds, speed.decode_seconds, [done[row].ids for row in range(rows)])


_generators: dict[int, Generator] = {}


def best_cache(model: StockLlama, prompts: list[list[int]]) -> str:
    """The cache that decodes 16 tokens fastest, after one run of each to warm up."""
    times = {}
    for _ in range(2):
        for cache in CACHES:
            times[cache] = of_stock(model, prompts, 16, cache).decode
    return min(times, key=times.get)


def steps_by_kind(
    stock: StockLlama, ours: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], cache: str
) -> list[dict[str, float]]:
    """Milliseconds of a decoding step of each side, by kind of op; `host` is what is not inside an op."""
    sides = [
        lambda tokens: of_stock(stock, prompts, tokens, cache),
        lambda tokens: of_ours(ours, tokenizer, prompts, tokens),
    ]
    found = []
    for run in sides:
        _generators.clear()
        run(PROFILED + 1)
        whole = statistics.median(run(PROFILED + 1).decode for _ in range(3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(PROFILED + 1)
        step = {kind: spent / PROFILED / 1000 for kind, spent in by_kind(behind_prefill(profile.events())).items()}
        found.append(step | {"host (Python, dispatch)": max(0.0, 1000 * whole / PROFILED - sum(step.values()))})
    _generators.clear()
    return found


def behind_prefill(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """torch's ops from the second forward on: each begins with the embedding."""
    ops = [event for event in events if event.name.startswith("aten::")]
    starts = sorted(event.time_range.start for event in ops if event.name == "aten::embedding")
    return [event for event in ops if event.time_range.start >= starts[1]]


def by_kind(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Microseconds inside ops, each one's own."""
    sums = dict.fromkeys([*KINDS, "element-wise"], 0.0)
    for event in events:
        name = event.name.removeprefix("aten::").lstrip("_")
        kind = next((k for k, names in KINDS.items() if name.startswith(names)), "element-wise")
        sums[kind] += event.self_cpu_time_total
    return sums


def profile_rows(batch: int, stock: dict[str, float], ours: dict[str, float]) -> list[str]:
    rows = ["", f"| decoding step, batch {batch}, ms | transformers' generate | this project's |", "|---|---|---|"]
    return rows + [f"| {kind} | {stock[kind]:.1f} | {ours[kind]:.1f} |" for kind in stock]


def memory_elsewhere(which: str, batch: int, options: argparse.Namespace) -> float:
    """Peak of a process of its own, GiB."""
    command = [sys.executable, __file__, "--memory-of", which, "--batches", str(batch), "--tokens", str(options.tokens)]
    command += ["--threads", str(options.threads or torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def memory(cfg: GenerateRecipe, which: str, batch: int, tokens: int) -> float:
    """Load and generate once; the process's peak in GiB."""
    tokenizer = load_tokenizer(cfg.model)
    prompts = prompts_of(cfg, tokenizer, batch)
    if which == "ours":
        of_ours(load_weights(cfg, tokenizer).eval(), tokenizer, prompts, tokens)
    else:
        of_stock(load_stock(cfg), prompts, tokens, which)
    return CPU.memory()["max_memory_allocated (GB)"]


if __name__ == "__main__":
    main()
