"""A result to compare: a run folder, its results file or log, or a named baseline. Read once, checked, then only figures.

`facts` are what two runs must share to be comparable at all: data by content, split, template, targets, lengths, labels rule, base
model, steps. `settings` are all options of a run, flat; what differs among them chooses the tolerance.
"""

from __future__ import annotations

import difflib
import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.pipeline.compose import REPOSITORY
from recipes.pipeline.config import InputError

BASELINES = REPOSITORY / "conf" / "baseline"
STEP_KEYS = ("loss", "grad_norm", "learning_rate")
PERPLEXITY_OFF = 1e-6  # relative: perplexity is exp of a loss with 17 digits


@dataclass
class Result:
    name: str
    metrics: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)  # by optimizer step
    tolerance: dict[str, float] = field(default_factory=dict)  # a baseline's own
    folder: Path | None = None
    command: str | None = None  # that made it, without its folder


def read(name: str) -> Result:
    """`name`: folder, all_results.json (or another results file), log.jsonl, or a name in conf/baseline. Raises InputError."""
    path = Path(name)
    if path.is_dir():
        return _of_folder(path)
    if path.is_file() and path.suffix == ".jsonl":
        return _of_log(path)
    if path.is_file() and path.suffix == ".json":
        known = _of_folder(path.parent) if (path.parent / "config.yaml").exists() else Result(name, {})
        return Result(name, _numbers(_json(path), path), known.facts, known.settings, known.steps, folder=path.parent)
    if (BASELINES / f"{name}.yaml").exists() and name != "none":
        return _of_baseline(name)
    near = difflib.get_close_matches(name, baselines(), n=3, cutoff=0.4)
    hint = f"; near: {', '.join(near)}" if near else f"; there is {', '.join(baselines())}"
    raise InputError(f"{name}: neither a run folder, a .json, a .jsonl nor a named baseline{hint}")


def baselines() -> list[str]:
    return sorted(path.stem for path in BASELINES.glob("*.yaml") if path.stem != "none")


def _of_folder(folder: Path) -> Result:
    results = folder / "all_results.json"
    if not results.exists():
        started = (folder / "config.yaml").exists()
        why = "the run has not finished, or was stopped" if started else "no run has written there"
        raise InputError(f"{folder}: no all_results.json ({why}); wait for its end or choose another folder")
    metrics = _numbers(_json(results), results)
    steps = _steps(folder / "log.jsonl") if (folder / "log.jsonl").exists() else {}
    settings = _settings(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    versions = _json(folder / "versions.json") if (folder / "versions.json").exists() else {}
    data = _json(folder / "data.json") if (folder / "data.json").exists() else {}
    settings |= {f"versions.{key}": versions.get(key) for key in ("device", "world_size", "torch", "cpu")}
    settings["versions.machine"] = _machine(versions.get("platform") or "")
    command = _command(versions.get("command") or "")
    return Result(
        str(folder), metrics, _facts(data, settings, metrics), settings, steps, folder=folder, command=command
    )


def _command(line: str) -> str | None:
    words = shlex.split(line)
    start = next((n for n, word in enumerate(words) if word.endswith("lora.py")), None)
    if start is None:
        return None
    return shlex.join(
        ["python", "recipes/lora.py", *(w for w in words[start + 1 :] if not w.startswith("hydra.run.dir="))]
    )


def _facts(data: dict[str, Any], settings: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any]:
    fingerprint = data.get("fingerprint", {})
    counts = data.get("counts", {})
    names = (
        "files",
        "eval_files",
        "held_out",
        "split",
        "template",
        "loss_on",
        "batching",
        "max_seq_length",
        "too_long",
    )
    facts = {f"data.{name}": fingerprint[name] for name in (*names, "tokenizer") if name in fingerprint}
    for part in ("train", "eval"):
        if "targets" in counts.get(part, {}):
            facts[f"{part}.targets"] = counts[part]["targets"]
    if "model.name_or_path" in settings:
        facts["model"] = _model_name(str(settings["model.name_or_path"]))
        sizes = {key: value for key, value in settings.items() if key.startswith("model.config.")}
        facts |= sizes
    for name in ("global_step", "epoch"):
        if name in metrics:
            facts[name] = round(metrics[name], 6)
    return facts


def _machine(platform: str) -> str:
    parts = platform.split("-")  # Linux-6.1.0-x86_64-with-glibc2.36: the kernel's version says nothing of the numbers
    return " ".join([parts[0], *(part for part in parts if part in ("x86_64", "aarch64", "arm64"))])


def _model_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].lower()  # a hub id and a local copy of it are one model


def _settings(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    for unrelated in ("defaults", "hydra"):
        loaded.pop(unrelated, None)
    return _flat(loaded)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _of_log(path: Path) -> Result:
    steps = _steps(path)
    if not steps:
        raise InputError(f"{path}: no training or evaluation step in it")
    metrics: dict[str, float] = {}
    for record in steps.values():  # the last evaluation stands
        metrics |= {key: value for key, value in record.items() if key.startswith(("eval_", "perplexity"))}
    losses = [record["loss"] for record in steps.values() if "loss" in record]
    if losses:
        metrics["train_loss"] = sum(losses) / len(losses)
    return Result(str(path), metrics, {"global_step": max(steps)}, {}, steps, folder=path.parent)


def _steps(path: Path) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            steps.setdefault(int(record["step"]), {}).update(
                {key: math.nan if value is None else value for key, value in record.items() if key != "step"}
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} line {number}: not a record of a step (half written?): {line[:60]!r}") from error
    return steps


def _of_baseline(name: str) -> Result:
    path = BASELINES / f"{name}.yaml"
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    steps = {int(step): record for step, record in (loaded.get("steps") or {}).items()}
    facts, settings = loaded.get("facts") or {}, loaded.get("settings") or {}
    return Result(
        name,
        _numbers(loaded["metrics"], path),
        facts,
        settings,
        steps,
        loaded.get("tolerance") or {},
        command=loaded.get("command"),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON (half written?): {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON object of results is expected, found a {type(content).__name__}")
    return content


def _numbers(content: dict[str, Any], path: Path) -> dict[str, float]:
    numbers = {key: math.nan if value is None else value for key, value in content.items()}
    numbers = {k: float(v) for k, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if not numbers:
        raise InputError(f"{path}: no figures in it")
    return numbers


def record_baseline(name: str, run: Result, overwrite: bool = False) -> Path:
    """Write `run` as conf/baseline/<name>.yaml. Raises InputError rather than write over one."""
    path = BASELINES / f"{name}.yaml"
    if not name.replace("_", "").isalnum():
        raise InputError(f"--record {name}: letters, digits and _ only, it becomes a file name")
    if path.exists() and not overwrite:
        raise InputError(f"--record {name}: {path} exists; choose another name, or add --overwrite")
    bad = [key for key, value in run.metrics.items() if not math.isfinite(value)]
    if bad or run.folder is None:
        raise InputError(
            f"--record {name}: {run.name} has no finite {', '.join(bad) or 'run folder'}; nothing to record"
        )
    kept = {step: {key: record[key] for key in STEP_KEYS if key in record} for step, record in run.steps.items()}
    content = {
        "name": name,
        "source": f"recorded by scripts/parity.py, {run.settings.get('versions.machine')}, torch {run.settings.get('versions.torch')}",
        "command": run.command,
        "metrics": run.metrics,
        "tolerance": {},
        "facts": run.facts,
        "settings": {key: value for key, value in run.settings.items() if key.split(".")[0] in SETTING_GROUPS},
        "steps": {str(step): record for step, record in kept.items() if record},
    }
    header = f"# Recorded from a run; compare another with  python scripts/parity.py RUN --baseline {name}\n"
    path.write_text(header + OmegaConf.to_yaml(OmegaConf.create(content)), encoding="utf-8")
    return path


SETTING_GROUPS = ("model", "adapter", "runtime", "deepspeed", "train", "seed", "versions")
