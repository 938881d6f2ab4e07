"""Runs of several configurations that should give the same numbers, and what came out. Used by parity.py."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from recipes.pipeline.config import InputError
from scripts import parity_report
from scripts.comparison import Comparison, Verdict, compare, rules
from scripts.divergence import Divergence, first_divergence
from scripts.ready_arms import READY
from scripts.results import Result, read
from scripts.statistics_of_arms import FEWEST, Paired, paired

ROOT = Path(__file__).resolve().parents[1]
STOCK = [["model.implementation=stock"], ["model.implementation=vendored"]]
# Relative size of a tensor's difference that counts as the first one, by kind of tolerance
TRACE_TOLERANCE = {"same": 1e-7, "ranks": 1e-4, "kernel": 1e-5, "dtype": 5e-2}


@dataclass
class Arm:
    name: str
    overrides: list[str]
    runs: list[Result] = field(default_factory=list)  # one a repeat or seed
    failure: str | None = None


@dataclass
class Outcome:
    """One arm against the first."""

    arm: Arm
    comparison: Comparison | None
    divergence: Divergence | None
    noise: Paired | None = None

    @property
    def verdict(self) -> Verdict:
        if self.comparison is None:
            return Verdict.DIFFERS
        if self.noise is not None and self.comparison.verdict is not Verdict.NOT_COMPARABLE:
            return Verdict.DIFFERS if self.noise.stands_out else Verdict.SAME
        return self.comparison.verdict


def experiment(options: argparse.Namespace) -> int:
    """Run the arms, print the verdict, write report.html. Returns the exit status."""
    arms = [Arm(" ".join(overrides) or "as configured", overrides) for overrides in _arms(options)]
    _check(options)
    folder = options.output or Path("outputs") / "parity" / time.strftime("%Y-%m-%d_%H-%M-%S")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--output {folder}: exists and is not empty; choose another folder")
    _run_all(arms, folder, options)
    outcomes = [_outcome(arm, arms[0], options) for arm in arms[1:]]
    verdict = max((outcome.verdict for outcome in outcomes), default=Verdict.SAME)
    if arms[0].failure:
        verdict = Verdict.NOT_COMPARABLE
    text = describe(arms, outcomes, verdict)
    print(text)
    from scripts.parity_html import write_report

    write_report(folder, arms, outcomes, verdict, text)
    print(f"report        {folder / 'report.html'}")
    if options.json:
        content = {
            "verdict": verdict.name.lower(),
            "exit_status": int(verdict),
            "arms": [_as_dict(o) for o in outcomes],
        }
        parity_report.write_json(options.json, content)
    return int(verdict)


def _check(options: argparse.Namespace) -> None:
    for name in ("baseline", "junit", "record"):
        if getattr(options, name):
            raise InputError(f"--{name} belongs to one finished RUN; arms are held against their first, see --json")
    if 0 < options.seeds < FEWEST:
        raise InputError(f"--seeds {options.seeds}: takes {FEWEST} or more; fewer say nothing of noise")
    if options.repeats < 1 or options.trace < 0:
        raise InputError(f"--repeats {options.repeats} --trace {options.trace}: take 1 or more, and 0 or more")


def _arms(options: argparse.Namespace) -> list[list[str]]:
    chosen = [bool(options.ab), bool(options.arms), options.stock]
    if sum(chosen) != 1:
        raise InputError("--ab, --arms and --stock are three ways to name the arms; give one of them")
    if options.stock:
        return STOCK
    if options.arms:
        return READY[options.arms]
    choices = []
    for item in options.ab:
        key, _, values = item.partition("=")
        if not values or "," not in values:
            raise InputError(f"--ab {item}: takes KEY=A,B with two values or more")
        choices.append([f"{key}={value}" for value in _split(values)])
    return [list(combination) for combination in itertools.product(*choices)]


def _split(values: str) -> list[str]:
    """At commas that are in no bracket."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _run_all(arms: list[Arm], folder: Path, options: argparse.Namespace) -> None:
    rounds = options.seeds or options.repeats
    with tqdm(total=rounds * len(arms), desc="arms", unit="run") as bar:
        for number in range(rounds):  # alternating, so that a slow hour meets every arm
            for index, arm in enumerate(arms):
                bar.set_postfix_str(arm.name, refresh=True)
                if arm.failure is None:
                    _run(arm, folder / f"arm{index}-run{number}", number, options)
                bar.update()


def _run(arm: Arm, folder: Path, number: int, options: argparse.Namespace) -> None:
    ranks = next((int(item.split("=")[1]) for item in arm.overrides if item.startswith("ranks=")), 1)
    overrides = [*options.arguments, *(item for item in arm.overrides if not item.startswith("ranks="))]
    if options.seeds:
        overrides.append(f"seed={42 + number}")
    command = [sys.executable]
    if ranks > 1:
        command += [str(ROOT / "scripts" / "gaudi_spawn.py"), "--world_size", str(ranks)]
        overrides = _split_rows(overrides, ranks)
    command += [str(ROOT / "recipes" / "lora.py"), *overrides]
    command += [
        f"hydra.run.dir={folder}",
        f"trace_steps={options.trace}",
        "data.show_samples=0",
        "samples=0",
        "memory_curve=false",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        arm.failure = f"exit status {done.returncode}: {lines[-1].strip() if lines else 'no message'}"
        return
    arm.runs.append(read(str(folder)))


def _split_rows(overrides: list[str], ranks: int) -> list[str]:
    """The same rows a step on more ranks: the configured batch divided by them."""
    from recipes.pipeline.compose import compose_here

    rows = compose_here(overrides).train.per_device_train_batch_size
    if rows % ranks:
        raise InputError(f"ranks={ranks}: train.per_device_train_batch_size={rows} cannot be divided by it")
    return [*overrides, f"train.per_device_train_batch_size={rows // ranks}"]


def _outcome(arm: Arm, first: Arm, options: argparse.Namespace) -> Outcome:
    if arm.failure or first.failure:
        return Outcome(arm, None, Divergence(arm.failure or f"the first arm failed: {first.failure}", None))
    allowed = _own_facts(arm, first) + tuple(options.allow)
    pairs = zip(arm.runs, first.runs, strict=True)  # a repeat is held against the first arm's; the worst one stands
    comparisons = [compare(one, other, tuple(options.require), allowed) for one, other in pairs]
    comparison = max(comparisons, key=lambda each: each.verdict)
    divergence = first_divergence(comparison, TRACE_TOLERANCE[comparison.kind])
    noise = None
    if options.seeds:
        losses = [[run.metrics["eval_loss"] for run in one.runs] for one in (arm, first)]
        noise = paired(*losses)
    return Outcome(arm, comparison, divergence if comparison.verdict is Verdict.DIFFERS else None, noise)


def _own_facts(arm: Arm, first: Arm) -> tuple[str, ...]:
    """Facts that the arms set themselves, and what follows from another way of batching."""
    keys = {item.lstrip("+~").split("=")[0] for one in (arm, first) for item in one.overrides}
    follow = (
        {"data.batching", "data.held_out", "epoch", "global_step", "train.targets", "eval_samples"}
        if "data.batching" in keys
        else set()
    )
    known = {*arm.runs[0].facts, *first.runs[0].facts, *rules()["metrics"]}
    return tuple(sorted((keys | follow) & known))


def describe(arms: list[Arm], outcomes: list[Outcome], verdict: Verdict) -> str:
    """The outcome as text, verdict first."""
    lines = [
        f"{parity_report.WORDS[verdict]}: {len(arms)} arms, {len(arms[0].runs)} run(s) each; first: {arms[0].name}"
    ]
    if arms[0].failure:
        lines.append(f"  {arms[0].name}: {arms[0].failure}")
    for outcome in outcomes:
        lines.append(f"{outcome.arm.name}: {parity_report.WORDS[outcome.verdict]}")
        if outcome.noise is not None:
            lines.append(f"  eval_loss {outcome.noise}")
        if outcome.divergence is not None:
            size = f", {outcome.divergence.relative:.1e} of the tensor" if outcome.divergence.relative else ""
            lines.append(f"  first divergence: {outcome.divergence.where}{size}")
        if outcome.comparison is not None:
            lines += [f"  {line}" for line in parity_report.table(outcome.comparison).splitlines()[1:]]
    for arm in arms:
        if len(arm.runs) > 1:
            lines.append(f"spread of {arm.name}: {_spread(arm)}")
    return "\n".join(lines)


def _spread(arm: Arm) -> str:
    parts = []
    for name in ("train_runtime", "max_memory_allocated (GB)", "eval_loss"):
        values = [run.metrics[name] for run in arm.runs if name in run.metrics]
        if not values:
            continue
        parts.append(f"{name} {min(values):.6g} to {max(values):.6g}")
    return ", ".join(parts)


def _as_dict(outcome: Outcome) -> dict:
    found = {} if outcome.comparison is None else parity_report.as_dict(outcome.comparison)
    found |= {"arm": outcome.arm.name, "verdict": outcome.verdict.name.lower(), "failure": outcome.arm.failure}
    found["first_divergence"] = outcome.divergence.where if outcome.divergence else None
    found["noise"] = outcome.noise._asdict() if outcome.noise else None
    return json.loads(json.dumps(found))
