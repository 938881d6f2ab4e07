"""The parts of check_gaudi.py that touch a card, one a process.   python scripts/card_checks.py kernels '{"hidden_size": ...}'

Prints a line `ROW [check, expected, seen, ok]` for each check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.pipeline.compose import compose_here
from recipes.pipeline.runtime import Runtime, start

MEMORY_KEYS = [
    "Limit",
    "InUse",
    "MaxInUse",
    "NumAllocs",
    "NumFrees",
    "ActiveAllocs",
    "MaxAllocSize",
    "TotalSystemAllocs",
    "TotalSystemFrees",
    "TotalActiveAllocs",
]


def main() -> None:
    part, shape = sys.argv[1], json.loads(sys.argv[2])
    cfg = compose_here(["+experiment=tiny", "runtime=gaudi_lazy"])
    runtime = start(cfg)
    PARTS[part](runtime, {name: int(value) for name, value in shape.items()})


def row(check: str, expected: str, seen: str, ok: bool) -> None:
    print("ROW", json.dumps([check, expected, seen, bool(ok)]), flush=True)


def device(runtime: Runtime, shape: dict[str, int]) -> None:
    """What the card says of itself, and the memory statistics that results are made of."""
    import torch

    count, name = torch.hpu.device_count(), torch.hpu.get_device_name()
    row("cards seen by this process", "1 or more", str(count), count > 0)
    row("type of card", "GAUDI2 or GAUDI3", name, name in ("GAUDI2", "GAUDI3"))
    stats = torch.hpu.memory_stats()
    lacking = sorted(set(MEMORY_KEYS) - set(stats))
    row(
        "keys of memory_stats",
        f"{len(MEMORY_KEYS)} known keys",
        f"lacking {lacking}" if lacking else "all",
        not lacking,
    )
    row("memory limit, GiB", "94 to 128", f"{stats['Limit'] / 1024**3:.2f}", 94 <= stats["Limit"] / 1024**3 <= 128)
    block = torch.ones(64 * 2**20, device="hpu")  # 256 MiB
    runtime.mark_step()
    runtime.synchronize()
    grown = (torch.hpu.memory_stats()["InUse"] - stats["InUse"]) / 2**20
    row("InUse grows by a tensor of 256 MiB", "256 MiB", f"{grown:.1f} MiB", abs(grown - 256) < 8)
    del block


def kernels(runtime: Runtime, shape: dict[str, int]) -> None:
    """Each fused kernel against the plain formula in float64 on the host."""
    import torch
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    from modeling import attention, ops

    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    fused = ops.by_name("hpu")
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        short = str(dtype).removeprefix("torch.")
        x, weight = random(4, 128, shape["hidden_size"]).to(dtype), random(shape["hidden_size"]).to(dtype)
        exact = torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
        _error(f"FusedRMSNorm, {short}", fused.rms_norm(x.to("hpu"), weight.to("hpu"), 1e-5), exact, tolerance)
        heads, angles = random(2, 4, 128, 64).to(dtype), random(1, 128, 32).repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        order = torch.arange(128)[None].to("hpu")
        turned = fused.rotate(*(tensor.to("hpu") for tensor in (heads, cos, sin)), order)
        _error(f"rotary embedding, {short}", turned, ops.rotate(heads.double(), cos, sin, order), tolerance)
        q, k, v = random(2, 8, 128, 64).to(dtype), random(2, 2, 128, 64).to(dtype), random(2, 2, 128, 64).to(dtype)
        packed = torch.ones(128, 128, dtype=torch.bool).tril()
        packed[64:, :64] = False
        for name, queries, mask in (
            ("causal", q, None),
            ("masked", q, packed[None, None]),
            ("decode", q[:, :, :1], None),
        ):
            exact = attention.eager(queries.double(), k.double(), v.double(), mask, softmax_dtype=torch.float64)
            on_card = [tensor.to("hpu") for tensor in (queries, k, v)]
            for recompute in (False, True):
                attend = attention.by_name("fused_sdpa", fused=attention.FusedOptions(recompute=recompute))
                found = attend(*on_card, None if mask is None else mask.to("hpu"), 0.0)
                _error(f"FusedSDPA {name}, {short}{', recompute' * recompute}", found, exact, tolerance)
    start_value, gradient = random(256), random(256)
    weight = torch.nn.Parameter(start_value.clone().to("hpu"))
    weight.grad = gradient.clone().to("hpu")
    FusedAdamW([weight], lr=1e-2, betas=(0.9, 0.999), eps=1e-12).step()
    # The first step of Adam is the sign of the gradient, whatever its size
    _error("FusedAdamW, first step", weight.detach(), (start_value - 1e-2 * gradient.sign()).double(), 1e-4)
    weight.grad = gradient.clone().to("hpu")
    norm = FusedClipNorm([weight], 1.0).clip_norm([weight])
    _error("FusedClipNorm, the norm", norm.reshape(()), gradient.double().norm(), 1e-4)
    _error("FusedClipNorm, the gradients", weight.grad, (gradient / gradient.norm()).double(), 1e-4)


def _error(name: str, found: object, exact: object, tolerance: float) -> None:
    apart = (found.to("cpu").double() - exact).abs().max().item() / max(exact.abs().max().item(), 1e-9)
    row(name, f"off by at most {tolerance:g}", f"{apart:.2e}", apart <= tolerance)


def memory(runtime: Runtime, shape: dict[str, int]) -> None:
    """Peak of an inference forward, in (batch, seq, hidden) tensors: what the in-place add and the graph break save."""
    peaks = {}
    for name, in_place, breaks in (("plain", False, False), ("graph break", False, True), ("both", None, True)):
        peaks[name] = _forward_peak(runtime, shape, in_place, breaks)
    saved = peaks["graph break"] - peaks["both"]
    row("in-place residual add saves", "0.5 to 2.5 tensors", f"{saved:.2f}", 0.5 <= saved <= 2.5)
    freed = peaks["plain"] - peaks["graph break"]
    row("mark_step before the layers saves", "0 or more tensors", f"{freed:.2f}", freed >= -0.25)


def _forward_peak(runtime: Runtime, shape: dict[str, int], in_place: bool | None, breaks: bool) -> float:
    import torch
    from transformers import LlamaConfig

    from modeling.execution import Execution, bind, mark_step_for
    from modeling.llama import LlamaForCausalLM

    # A wide MLP: the peak is where both the residual and the layer's output are alive, not in the attention
    wide = {"num_hidden_layers": 2, "intermediate_size": 6 * shape["hidden_size"]}
    config = LlamaConfig(**{**shape, **wide}, use_cache=False)
    with torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval().to("hpu")
        breaker = mark_step_for("hpu", lazy=True) if breaks else None
        bind(model, Execution(mark_step=breaker, in_place_residual=in_place, attention="fused_sdpa", ops="hpu"))
        rows = (16, 1024) if config.hidden_size >= 4096 else (16, 512)
        ids = torch.randint(0, config.vocab_size, rows).to("hpu")
        for _ in range(2):  # the second pass has its graphs
            runtime.synchronize()
            torch.hpu.reset_peak_memory_stats()
            before = torch.hpu.memory_stats()["InUse"]
            model(ids, logits_to_keep=1).logits.to("cpu")
            runtime.synchronize()
            peak = torch.hpu.memory_stats()["MaxInUse"] - before
    return peak / (ids.numel() * config.hidden_size * 2)


def graphs(runtime: Runtime, shape: dict[str, int]) -> None:
    """Graph compilations must stand still after warm-up at fixed shapes."""
    import torch
    from transformers import LlamaConfig

    from modeling.execution import Execution, bind, mark_step_for
    from modeling.llama import LlamaForCausalLM

    metric = torch.hpu.metrics.metric_global("graph_compilation")
    config = LlamaConfig(**{**shape, "num_hidden_layers": 2}, use_cache=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16).train().to("hpu")
    mark_step: Callable[[], None] = mark_step_for("hpu", lazy=True)
    bind(model, Execution(mark_step=mark_step, attention="fused_sdpa", ops="hpu"))
    counts = []
    for _ in range(5):
        ids = torch.randint(0, config.vocab_size, (2, 128)).to("hpu")
        model(ids, labels=ids).loss.backward()
        mark_step()
        model.zero_grad()
        mark_step()
        runtime.synchronize()
        counts.append(dict(metric.stats())["TotalNumber"])
    row("graphs compiled in steps 4 and 5", "0", str(counts[4] - counts[2]), counts[4] == counts[2])
    row("steps compile graphs at all", "more than 0", str(counts[0]), counts[0] > 0)


PARTS = {"device": device, "kernels": kernels, "memory": memory, "graphs": graphs}

if __name__ == "__main__":
    main()
