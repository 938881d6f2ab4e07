"""What a run leaves for its reader: configuration and versions, the loss curve, a model card, a summary."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from recipes.pipeline.adapter import describe_model
from recipes.pipeline.compose import REPOSITORY, to_yaml
from recipes.pipeline.config import InputError, LoraRecipe
from recipes.pipeline.data import Data, describe
from recipes.pipeline.memory_curve import compared
from recipes.pipeline.metrics import compare_with_baseline, write_json, write_results
from recipes.pipeline.progress import read_log
from recipes.pipeline.runtime import Runtime

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "deepspeed",
    "optimum-habana",
    "habana-torch-plugin",
    "hydra-core",
    "gguf",
)
FINISHED = ("all_results.json", "adapter", "config.yaml")


def open_run_folder(cfg: LoraRecipe, runtime: Runtime, folder: Path) -> None:
    """Refuse a folder that holds another run, unless this one goes on with it; write what is known before the start."""
    taken = [name for name in FINISHED if (folder / name).exists()]
    if taken and not cfg.train.resume_from_checkpoint:
        raise InputError(
            f"hydra.run.dir={folder} already holds a run ({taken[0]}); choose another folder,"
            " or go on with it: train.resume_from_checkpoint=last"
        )
    runtime.barrier()
    if not runtime.is_main:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
        write_json(folder / "versions.json", versions(cfg, runtime))
    except OSError as error:
        raise InputError(f"hydra.run.dir={folder}: {error.strerror}; choose a folder that can be written") from error


def versions(cfg: LoraRecipe, runtime: Runtime) -> dict[str, Any]:
    """Software, machine and command of this run."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {
        **found,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),  # which vector instructions kernels of the CPU use
        "device": runtime.kind,
        "world_size": runtime.world_size,
        "command": shlex.join([sys.executable, *sys.argv]),
        "environment": runtime.environment,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": (_git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def introduce(
    runtime: Runtime, folder: Path, data: Data, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module
) -> None:
    """Say on rank 0 what is about to be trained on what; keep the data's counts and fingerprint in data.json. Collective."""
    described = describe_model(model)
    if not runtime.is_main:
        return
    mode = "lazy" if runtime.lazy else "eager"
    print(f"device        {runtime.kind}, {mode}, {runtime.world_size} rank(s), backend {runtime.backend}")
    print(described)
    print(describe(data, tokenizer), flush=True)
    write_json(folder / "data.json", {"counts": data.counts, "fingerprint": data.fingerprint})


def finish(cfg: LoraRecipe, runtime: Runtime, folder: Path, results: dict[str, Any]) -> None:
    """Write the results, the curve and the model card, and print the summary. Rank 0 only."""
    if not runtime.is_main:
        return
    if "eval_loss_before" not in results and (first := _first_evaluation(folder)) and cfg.train.do_train:
        results["eval_loss_before"] = first["eval_loss"]
    write_results(folder, results)
    if cfg.train.do_train:
        draw_loss(folder)
        (folder / "adapter" / "README.md").write_text(model_card(cfg, results), encoding="utf-8")
    print(summary(cfg, folder, results), flush=True)


def _first_evaluation(folder: Path) -> dict[str, Any] | None:
    return next((record for record in read_log(folder) if record["step"] == 0 and "eval_loss" in record), None)


def draw_loss(folder: Path) -> None:
    """loss.png: training loss by step, evaluation loss at its steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_log(folder)
    train = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    evaluation = [(record["step"], record["eval_loss"]) for record in records if record.get("eval_loss") is not None]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4c0", linewidth=1.2, label="training, one step's rows")
    if evaluation:
        axes.plot(*zip(*evaluation, strict=True), color="#c8553d", marker="o", linewidth=1.8, label="held-out records")
        for step, loss in (evaluation[0], evaluation[-1]):
            axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per target token)", title="LoRA training")
    axes.grid(alpha=0.3)
    axes.margins(y=0.15)
    if train or evaluation:
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "loss.png")
    plt.close(figure)


def model_card(cfg: LoraRecipe, results: dict[str, Any]) -> str:
    """A short README for the adapter's folder."""
    figures = "\n".join(
        f"| {name} | {results[name]:.6g} |"
        for name in (
            "eval_loss_before",
            "eval_loss",
            "perplexity",
            "eval_accuracy",
            "train_loss",
            "eval_samples",
            "eval_targets",
        )
        if isinstance(results.get(name), int | float)
    )
    base, adapter, train = cfg.model.name_or_path, cfg.adapter, cfg.train
    return f"""---
base_model: {base}
library_name: peft
tags: [lora, llama]
---
# LoRA adapter of {base}

Rank {adapter.r}, alpha {adapter.lora_alpha:g}, on {", ".join(adapter.target_modules)}; trained on `{Path(cfg.data.path).name}`
with the {cfg.data.template.name} template, loss on {cfg.data.loss_on.name} tokens, up to {cfg.data.max_seq_length} tokens a row.
Learning rate {train.learning_rate:g}, {results.get("global_step", "?")} optimizer steps, seed {cfg.seed}.

| metric | value |
|---|---|
{figures}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), ADAPTER_FOLDER)
```
"""


def summary(cfg: LoraRecipe, folder: Path, results: dict[str, Any]) -> str:
    """A few lines: what came out, where it is, what to run next."""
    lines = [""]
    if (before := results.get("eval_loss_before")) and (after := results.get("eval_loss")) is not None:
        lines.append(f"eval loss     {before:.5f} -> {after:.5f} ({100 * (after - before) / before:+.1f} %)")
    elif results.get("eval_loss") is not None:
        lines.append(f"eval loss     {results['eval_loss']:.5f}")
    if results.get("perplexity") is not None:
        counts = f"{results['eval_targets']:,} targets in {results['eval_samples']:,} rows"
        lines.append(f"perplexity    {results['perplexity']:.4f}, accuracy {results['eval_accuracy']:.4f}, {counts}")
    if "train_samples_per_second" in results:
        rate = f"{results['train_samples_per_second']:g} samples/s, {results['train_tokens_per_second']:g} tokens/s"
        lines.append(f"training      {results['train_runtime']:.0f} s, {rate}")
    lines.append(f"peak memory   {results['max_memory_allocated (GB)']:g} GiB")
    lines += compared(results)
    lines += [
        f"baseline      {line}" for line in compare_with_baseline(results, cfg.baseline.metrics, cfg.baseline.tolerance)
    ]
    shown = os.path.relpath(folder)
    lines.append(f"results       {shown}")
    if cfg.train.do_train:
        lines.append(f"adapter       {shown}/adapter")
        lines.append(f"curve         {shown}/loss.png")
        again = [a for a in sys.argv[1:] if not a.startswith(("train.", "adapter.path", "hydra."))]
        command = shlex.join(
            ["python", "recipes/lora.py", *again, "train.do_train=false", f"adapter.path={shown}/adapter"]
        )
        lines.append(f"evaluate it   {command}")
    return "\n".join(lines)
