"""This project's Llama against transformers' own, as one Markdown table.   python scripts/bench.py

Training: SmolLM2-135M's shape with random weights, 4 rows of 512 tokens, LoRA rank 4 on q, k, v, o, float32; peak memory
above the weights from torch's allocator events, step time as the median ratio of paired steps. Inference: peak of living
tensors at Llama-2-70B's shape (172 rows, 2,048 tokens, bf16, last-position logits, 3 layers) with fake tensors, in units of
one (batch, seq, hidden) tensor. Graphs: torch's lazy engine, 2 layers, a training step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama

from modeling.execution import Execution, bind, mark_step_for
from modeling.liveness import LivePeak, allocator_peak
from modeling.llama import LlamaForCausalLM

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
MIB = 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs of training steps")
    parser.add_argument("--layers", type=int, default=30, help="decoder layers of the training comparison")
    parser.add_argument("--graphs-of", choices=["stock", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.graphs_of:
        return print(*graphs(options.graphs_of == "stock"))
    print(table(options.pairs, options.layers))


def table(pairs: int, layers: int) -> str:
    """All comparisons as Markdown; a progress bar meanwhile."""
    rows = ["| | transformers' Llama | this Llama | ratio |", "|---|---|---|---|"]
    with tqdm(total=pairs + 4, desc="measuring", unit="part") as bar:
        stock, ours, ratio = training(pairs, layers, bar.update)
        rows.append(_row("training: peak above weights, MiB", stock, ours, "{:.0f}"))
        rows.append(f"| training: step time, median of {pairs} pairs | 1 | {ratio:.2f} | {ratio:.2f} |")
        for ranks, name in ((8, "tensor parallel 8"), (1, "whole model")):
            peaks = [inference(StockLlama, ranks, None), inference(LlamaForCausalLM, ranks, None)]
            without = inference(LlamaForCausalLM, ranks, False)
            rows.append(_row(f"inference, {name}: peak in (batch, seq, hidden) tensors", *peaks, "{:.2f}"))
            causes = f"lifetimes -{peaks[0] - without:.2f}, in-place add -{without - peaks[1]:.2f}"
            rows.append(f"| inference, {name}: of which | | {causes} | |")
            bar.update()
        counts = [_graphs_elsewhere(which) for which in ("stock", "ours")]
        rows.append(_row("lazy: graphs a training step", counts[0][0], counts[1][0], "{:.0f}"))
        rows.append(f"| lazy: compilations after warm-up | {counts[0][1]} | {counts[1][1]} | |")
        bar.update()
    return "\n".join(rows)


def _row(name: str, stock: float, ours: float, form: str) -> str:
    return f"| {name} | {form.format(stock)} | {form.format(ours)} | {ours / stock:.2f} |"


def training(pairs: int, layers: int, tick: Callable[[], object]) -> tuple[float, float, float]:
    """Peak MiB of stock and ours, and the median time ratio ours / stock."""
    ids = torch.randint(0, SMOLLM2["vocab_size"], (4, 512), generator=torch.Generator().manual_seed(0))
    models = [_trained(model_class, layers) for model_class in (StockLlama, LlamaForCausalLM)]

    def step(model: torch.nn.Module) -> float:
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        return time.perf_counter() - began

    peaks = []
    for model in models:
        step(model)
        model.zero_grad(set_to_none=True)
        peaks.append(allocator_peak(lambda model=model: step(model)) / MIB)
        tick()
    ratios = []
    for _ in range(pairs):
        stock, ours = (step(model) for model in models)
        ratios.append(ours / stock)
        tick()
    return peaks[0], peaks[1], statistics.median(ratios)


def _trained(model_class: type, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = model_class(LlamaConfig(**{**SMOLLM2, "num_hidden_layers": layers})).train()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def inference(model_class: type, ranks: int, in_place: bool | None) -> float:
    """Peak of one forward at Llama-2-70B's shape in (batch, seq, hidden) tensors; only ours has an in-place switch."""
    rows, length, hidden = 172, 2048, 8192
    config = LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=28672 // ranks, num_hidden_layers=3, head_dim=128,
        num_attention_heads=64 // ranks, num_key_value_heads=8 // ranks, use_cache=False,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        model = model_class(config).eval()
        torch.set_default_dtype(torch.float32)
        if model_class is LlamaForCausalLM:
            bind(model, Execution(in_place_residual=in_place))
        ids = torch.zeros(rows, length, dtype=torch.long)
        with torch.no_grad(), LivePeak() as live:
            model(ids, logits_to_keep=1)
    return live.peak / (rows * length * hidden * 2)


def _graphs_elsewhere(which: str) -> list[int]:
    # the lazy engine cannot be taken out of a process again
    command = [sys.executable, __file__, "--graphs-of", which]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def graphs(stock: bool) -> tuple[int, int]:
    """Graphs of a training step and compilations after the second one, on torch's lazy engine."""
    import torch._lazy.metrics as metrics

    from recipes.pipeline.runtime import start_lazy_engine

    start_lazy_engine()
    mark_step = mark_step_for("lazy", lazy=True)
    config = LlamaConfig(**{**SMOLLM2, "num_hidden_layers": 2, "vocab_size": 512, "tie_word_embeddings": False})
    model = (StockLlama if stock else LlamaForCausalLM)(config).to("lazy").train()
    if stock:
        model.set_attn_implementation("eager")
        model.model.rotary_emb = _OurTables(config)  # its own asks for autocast, which the engine refuses
    else:
        bind(model, Execution(mark_step=mark_step, attention="eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, late = 0, 0
    for step in range(5):
        ids = torch.randint(0, 512, (4, 32)).to("lazy")
        metrics.reset()
        model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        mark_step()
        optimizer.step()
        optimizer.zero_grad()
        mark_step()
        compiled = metrics.counter_value("UncachedCompile") or 0
        total = compiled + (metrics.counter_value("CachedCompile") or 0)
        late += compiled if step >= 2 else 0
    return total, late


class _OurTables(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        from modeling.llama import LlamaRotaryEmbedding

        self.tables = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(table.to(x.dtype) for table in self.tables(position_ids))


if __name__ == "__main__":
    main()
