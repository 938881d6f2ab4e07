"""What is seen of a run while it goes: log.jsonl by step, and a progress bar with loss, tokens/s and time left."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

LOG_FILE = "log.jsonl"


class StepLog(TrainerCallback):
    """Counts each step's samples and tokens; rank 0 writes every log record as a line of log.jsonl."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.path = Path(trainer.args.output_dir) / LOG_FILE

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.throughput.step(self.trainer.step_samples, self.trainer.step_tokens)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.logged_step = state.global_step  # above 0 when resumed
        if state.global_step and self.trainer.runtime.is_main:
            self._forget_after(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not self.trainer.runtime.is_main or not logs or "train_runtime" in logs:
            return
        record = {"step": state.global_step, **logs, **self.trainer.runtime.memory(), "time": round(time.time(), 3)}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def _forget_after(self, step: int) -> None:
        # A resumed run trains these steps again
        if self.path.exists():
            kept = [record for record in read_log(self.path.parent) if record["step"] <= step]
            self.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


class ProgressBar(TrainerCallback):
    """Rank 0's bars: one over the optimizer steps, one over the batches of an evaluation that lasts."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: tqdm | None = None
        self.batches: tqdm | None = None
        self.began = (0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.runtime.is_main:
            self.steps = _bar(state.max_steps, "training", "step", initial=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps is not None:
            self.steps.update(state.global_step - self.steps.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.steps is None or not logs:
            return
        shown = {}
        if "loss" in logs:
            shown["loss"] = f"{logs['loss']:.4f}"
        if "eval_loss" in logs:
            self.steps.write(f"step {state.global_step}: eval_loss {logs['eval_loss']:.5f}", file=sys.stderr)
        if rate := self.trainer.throughput.tokens_per_second():
            shown["tokens/s"] = f"{rate:.0f}"
        if shown:
            self.steps.set_postfix(shown, refresh=False)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if not self.trainer.runtime.is_main or (self.steps is not None and not sys.stderr.isatty()):
            return
        if self.batches is None:
            self.batches = _bar(len(eval_dataloader), "evaluation", "batch", leave=False)
        self.batches.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.batches is not None:
            self.batches.close()
            self.batches = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps is not None:
            self.steps.close()
            self.steps = None


def _bar(total: int, title: str, unit: str, **options: Any) -> tqdm:
    # A file gets a line now and then, not one a step
    interval = 0.5 if sys.stderr.isatty() else 30
    return tqdm(total=total, desc=title, unit=unit, dynamic_ncols=True, mininterval=interval, **options)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Records of log.jsonl; a last line that was cut short by a crash is left out."""
    records = []
    path = folder / LOG_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
