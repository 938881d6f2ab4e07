"""Graphs of a configuration in lazy execution, counted on torch's own lazy engine: how many a step, what is compiled when,
what breaks them, and the ops between breaks.   python scripts/graphs.py +experiment=tiny

Runs the configured model (random weights of its shape, `--layers` of them) for a few training, evaluation and decoding
steps. A break is an explicit mark_step, or an op that the engine cannot defer: it falls back to the CPU and cuts the graph.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.pipeline.compose import compose_here, exit_on_error
from recipes.pipeline.config import Device, LoraRecipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of each kind")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers to build; counts grow linearly with them")
    parser.add_argument(
        "overrides", nargs="*", help="as for recipes/lora.py: +experiment=tiny runtime.mark_step=false ..."
    )
    options = parser.parse_intermixed_args()
    with exit_on_error():
        cfg = compose_here([*options.overrides, "runtime=cpu_lazy"])
        # of the user's runtime only what the engine can do: Gaudi's kernels and devices are not here
        print(report(cfg, options.steps, options.layers))


def report(cfg: LoraRecipe, steps: int, layers: int) -> str:
    """The table, as text. Starts the lazy engine in this process."""
    import torch
    from transformers import LlamaConfig

    from modeling.cache import StaticKeyValues
    from modeling.execution import bind
    from modeling.llama import LlamaForCausalLM
    from recipes.pipeline.model import build_execution
    from recipes.pipeline.preflight import shape_of
    from recipes.pipeline.runtime import Runtime, start_lazy_engine

    assert cfg.runtime.device is Device.lazy
    start_lazy_engine()
    shape = shape_of(cfg)
    config = LlamaConfig(**{**shape.to_dict(), "num_hidden_layers": layers, "use_cache": False})
    torch.manual_seed(cfg.seed)
    model = LlamaForCausalLM(config).to("lazy")
    runtime = Runtime("lazy", lazy=True)
    bind(model, build_execution(cfg.runtime, runtime))
    rows, length = cfg.train.per_device_train_batch_size, min(cfg.data.max_seq_length, 128)
    ids = torch.randint(0, config.vocab_size, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    optimizer = torch.optim.SGD(
        [p for n, p in model.named_parameters() if n.endswith(("q_proj.weight", "v_proj.weight"))], lr=0.1
    )
    nothing = torch.empty(0, dtype=torch.long, device="lazy")

    def train() -> None:
        inputs = ids.to("lazy")
        model.train()(inputs, attention_mask=mask.to("lazy"), labels=inputs).loss.backward()
        runtime.mark_step()
        optimizer.step()
        optimizer.zero_grad()
        runtime.mark_step()

    @torch.no_grad()
    def evaluate() -> None:
        inputs = ids.to("lazy")
        model.eval()(inputs, attention_mask=mask.to("lazy"), labels=inputs, logits_to_keep=nothing)
        runtime.mark_step()

    cache = StaticKeyValues(config, rows, length + steps + 1, device="lazy")
    token = ids[:, :1].to("lazy")

    @torch.no_grad()
    def decode() -> None:
        model.eval()(token, past_key_values=cache, cache_position=cache.position.reshape(1))
        runtime.mark_step()

    head = f"{rows} rows of {length} tokens, {layers} layers, attention {cfg.runtime.attention.name}"
    lines = [
        head,
        f"{'':10} {'graphs':>7} {'breaks':>7} {'fall-backs':>10} {'ops/graph':>10}  compiled in step 1, 2, ...",
    ]
    for name, step in (("training", train), ("evaluation", evaluate), ("decoding", decode)):
        lines += _lines(name, [_counted(step) for _ in range(steps)])
    return "\n".join(lines)


def _counted(step: object) -> dict[str, int]:
    import torch._lazy.metrics as metrics

    metrics.reset()
    step()
    return {name: metrics.counter_value(name) or 0 for name in metrics.counter_names()}


def _lines(name: str, counts: list[dict[str, int]]) -> list[str]:
    last = counts[-1]
    graphs = last.get("UncachedCompile", 0) + last.get("CachedCompile", 0)
    fallbacks = {op: n for op, n in last.items() if op.startswith("aten::")}
    ops = sum(n for op, n in last.items() if op.startswith("lazy::"))
    compiled = ", ".join(str(count.get("UncachedCompile", 0)) for count in counts)
    line = f"{name:10} {graphs:7} {last.get('MarkStep', 0):7} {sum(fallbacks.values()):10} {ops / max(graphs, 1):10.1f}  {compiled}"
    causes = ", ".join(
        f"{op.removeprefix('aten::')} x{n}" for op, n in sorted(fallbacks.items(), key=lambda item: -item[1])
    )
    return [line, f"{'':10} fall-backs: {causes or 'none'}"]


if __name__ == "__main__":
    main()
