"""First day on a Gaudi server: checks software and cards against what this project expects, and says where they differ.

  python scripts/check_gaudi.py                    all parts, 7B shapes with random weights, about 15 minutes
  python scripts/check_gaudi.py --size tiny        the same in about two minutes
  python scripts/check_gaudi.py --parts kernels    one part

It prints a table of expected against seen and writes gaudi_check.json, which can be attached to a report. Exit status: 0 when
everything is as expected, 1 when something differs, 2 when there is no Gaudi software or card here. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.pipeline.compatibility import TORCH_OF_GAUDI, gaudi_warnings
from recipes.pipeline.runtime import hpu_cards, hpu_installed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["habana-torch-plugin", "torch", "optimum-habana", "transformers", "accelerate", "peft", "deepspeed"]
# Random weights; the tokenizer is one id a byte, so nothing has to be downloaded
SIZES = {
    "7b": "hidden_size=4096 intermediate_size=11008 num_hidden_layers=32 num_attention_heads=32 num_key_value_heads=32"
    " vocab_size=32000",
    "tiny": "hidden_size=128 intermediate_size=256 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2"
    " vocab_size=512",
}


class Row(NamedTuple):
    part: str
    check: str
    expected: str
    seen: str
    ok: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7b", help="shapes of the runs (default 7b)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these (default all)")
    parser.add_argument("--output", type=Path, default=Path("gaudi_check.json"), help="JSON file to write")
    options = parser.parse_args()
    if not options.output.absolute().parent.is_dir() or options.output.is_dir():
        parser.error(f"--output {options.output}: no file can be written there; give a file in a folder that exists")
    missing = [] if hpu_installed() else ["habana_frameworks is not installed (run in Gaudi's image)"]
    if hpu_cards() == 0:
        missing.append("no card found (neither /dev/accel/accel* nor hl-smi shows one)")
    if missing:
        print(f"error: no Gaudi here: {'; '.join(missing)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            print(f"{part} ...", file=sys.stderr, flush=True)
            for row in PARTS[part](options.size, Path(folder)):
                rows.append(row)
                print(_line(row), flush=True)
    _write(options.output, rows)
    wrong = [row for row in rows if not row.ok]
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} as expected; written to {options.output}")
    return 1 if wrong else 0


def _line(row: Row) -> str:
    return f"{'ok  ' if row.ok else 'DIFF'}  {row.part:<10} {row.check:<44} expected {row.expected:<28} seen {row.seen}"


def _write(path: Path, rows: list[Row]) -> None:
    content = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("PT_HPU", "HABANA_V"))},
        "rows": [row._asdict() for row in rows],
    }
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Parts. Each is a generator of rows; what touches the card runs in a process of its own, so that modes and memory start fresh


def versions(size: str, folder: Path) -> Iterator[Row]:
    warnings = gaudi_warnings()
    pairs = ", ".join(f"{gaudi} with torch {torch}" for gaudi, torch in TORCH_OF_GAUDI.items())
    seen = f"Gaudi {_version('habana-torch-plugin')}, torch {_version('torch')}"
    yield Row("versions", "release and torch", "a pair of: " + pairs, "; ".join([seen, *warnings]), not warnings)
    habana = _version("optimum-habana")
    yield Row("versions", "optimum-habana", "1.21.2", str(habana), habana == "1.21.2")
    yield Row("cards", "cards of this server", "1 or more", str(hpu_cards()), hpu_cards() > 0)


def _on_card(part: str) -> Callable[[str, Path], Iterator[Row]]:
    def rows(size: str, folder: Path) -> Iterator[Row]:
        shape = dict(pair.split("=") for pair in SIZES[size].split())
        command = [sys.executable, str(ROOT / "scripts" / "card_checks.py"), part, json.dumps(shape)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        for line in done.stdout.splitlines():
            if line.startswith("ROW "):
                yield Row(part, *json.loads(line[4:]))
        if done.returncode:
            yield Row(part, "ran to its end", "exit status 0", _last_line(done), False)

    return rows


def modes(size: str, folder: Path) -> Iterator[Row]:
    """Ten training steps lazily and eagerly: the same losses."""
    steps = "train.max_steps=10"
    lazy, eager = (_train(size, folder / mode, [f"runtime={mode}", steps]) for mode in ("gaudi_lazy", "gaudi_eager"))
    yield from _compare("modes", "losses of 10 steps, lazy against eager", lazy, eager)


def ranks(size: str, folder: Path) -> Iterator[Row]:
    """Five ZeRO-3 steps on every card against one card with the same rows a step."""
    count = hpu_cards()
    rows = "train.per_device_train_batch_size"
    launch = ["--world_size", str(count), "--use_deepspeed"]
    common = ["runtime=gaudi_lazy", "train.max_steps=5"]
    many = _train(size, folder / "many", [*common, "deepspeed=zero3", f"{rows}=1"], launch)
    one = _train(size, folder / "one", [*common, f"{rows}=1", f"train.gradient_accumulation_steps={count}"])
    yield from _compare("ranks", f"losses of 5 ZeRO-3 steps, {count} cards against 1", many, one)


def _train(size: str, folder: Path, overrides: list[str], launch: list[str] | None = None) -> list[float] | str:
    shape = [f"model.config.{pair}" for pair in SIZES[size].split()]
    command = [sys.executable]
    if launch:
        command += [str(ROOT / "scripts" / "gaudi_spawn.py"), *launch]
    command += [str(ROOT / "recipes" / "lora.py"), "+experiment=tiny", *shape, "model.dtype=bfloat16"]
    command += ["train.do_eval=false", "train.eval_strategy=no", "train.learning_rate=1e-3", f"hydra.run.dir={folder}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True)
    if done.returncode:
        return _last_line(done)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [entry["loss"] for entry in log if "loss" in entry]


def _compare(part: str, check: str, first: list[float] | str, second: list[float] | str) -> Iterator[Row]:
    if isinstance(first, str) or isinstance(second, str):
        yield Row(part, check, "both run", str(first if isinstance(first, str) else second), False)
        return
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    yield Row(part, check, "apart by at most 0.02 (bf16)", f"{apart:.5f}; last {first[-1]:.4f}", apart <= 0.02)


def _last_line(done: subprocess.CompletedProcess) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"exit status {done.returncode}: {lines[-1].strip() if lines else 'no message'}"


PARTS = {
    "versions": versions,
    "device": _on_card("device"),
    "kernels": _on_card("kernels"),
    "memory": _on_card("memory"),
    "graphs": _on_card("graphs"),
    "modes": modes,
    "ranks": ranks,
}

if __name__ == "__main__":
    sys.exit(main())
