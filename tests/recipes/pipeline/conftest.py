"""Runs of the recipe on a tiny model, kept small: each is a process."""

import json
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
LORA = str(REPOSITORY / "recipes" / "lora.py")
LAUNCHER = str(REPOSITORY / "scripts" / "gaudi_spawn.py")


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """64 Alpaca records with answers of different lengths."""
    path = tmp_path_factory.mktemp("records") / "records.json"
    words = ["red", "green", "blue", "yellow", "black", "white", "brown", "violet"]
    rows = [
        {"instruction": f"Name {n % 5 + 1} colors.", "input": "" if n % 2 else f"Start with {words[n % 8]}.",
         "output": ", ".join(words[(n + k) % 8] for k in range(n % 5 + 1))}
        for n in range(64)
    ]  # fmt: skip
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def smol_tokenizer(smol_folder):
    """SmolLM2's, as a run takes it: its chat template's end token ends a response and pads."""
    tokenizer = AutoTokenizer.from_pretrained(smol_folder)
    tokenizer.add_bos_token, tokenizer.eos_token, tokenizer.pad_token = False, "<|im_end|>", "<|im_end|>"
    return tokenizer


class Run:
    def __init__(self, folder: Path, done: subprocess.CompletedProcess) -> None:
        self.folder, self.returncode, self.stdout, self.stderr = folder, done.returncode, done.stdout, done.stderr

    @property
    def log(self):
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def series(self, key: str):
        return [record[key] for record in self.log if key in record]

    @property
    def results(self):
        return json.loads((self.folder / "all_results.json").read_text())


@pytest.fixture(scope="session")
def tiny(records, tmp_path_factory, warm_python):
    """tiny("train.max_steps=2", ranks=2, launcher=["--use_deepspeed"]) -> Run of +experiment=tiny in a folder of its own."""
    home = tmp_path_factory.mktemp("tiny")

    def start(*overrides: str, ranks: int = 1, launcher: tuple[str, ...] = (), folder: Path | None = None) -> Run:
        folder = folder or home / f"run{len(list(home.glob('run*')))}"
        folder.parent.mkdir(exist_ok=True, parents=True)
        fixed = [f"data.path={records}", f"data.cache_dir={home / 'cache'}", "runtime=cpu", "train.tensorboard=false"]
        fixed += ["data.max_train_samples=null", "train.group_by_length=false", f"hydra.run.dir={folder}"]
        own = {override.split("=")[0] for override in overrides}
        command = [LORA, "+experiment=tiny", *[f for f in fixed if f.split("=")[0] not in own], *overrides]
        if ranks > 1 or launcher:
            command = [LAUNCHER, "--world_size", str(ranks), *launcher, *command]
        done = subprocess.run([warm_python, *command], cwd=home, capture_output=True, text=True, timeout=300)
        return Run(folder, done)

    return start
