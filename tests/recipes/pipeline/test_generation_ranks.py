"""Generation on two ranks: the single process's ids in each mode; memory of tensor parallelism."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from modeling.llama import LlamaForCausalLM as OurLlama
from recipes.pipeline.config import GenerateConfig
from recipes.pipeline.generation import Generator, Request
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.tokenizer import bytes_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = str(REPOSITORY / "tests" / "recipes" / "pipeline" / "generate_on_ranks.py")
LAUNCHER = str(REPOSITORY / "scripts" / "gaudi_spawn.py")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def llama(folder: Path, scale: float, **shape) -> LlamaForCausalLM:
    torch.manual_seed(4)
    special = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    model = LlamaForCausalLM(LlamaConfig(**special, max_position_embeddings=128, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
            elif parameter.numel() > 200:
                parameter.normal_(1, 0.2)  # norms that are not all ones
    model.save_pretrained(folder, max_shard_size="400MB")
    return model


def run(python: str, folder: Path, ranks: int, *modes: str) -> dict:
    command = [SCRIPT, str(folder), *modes]
    if ranks > 1:
        engine = ["--use_deepspeed"] if "zero3" in modes else []
        command = [LAUNCHER, "--world_size", str(ranks), *engine, *command]
    done = subprocess.run([python, *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"{'_'.join(modes)}.json").read_text())


def expected(model, prompts, tokens, ends):
    """One process, transformers' own generate."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=258,
            eos_token_id=ends or None,
        )  # fmt: skip
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, warm_python):
    """(ids by case, results of two ranks by "mode case", peak of one process with the large model)."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "nothing.txt").write_text("unused\n")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    # 301 rows of the vocabulary do not divide by two; tied and untied heads, biases
    model = llama(folder / "untied", 6, vocab_size=301, num_key_value_heads=2, **small)
    tied = llama(
        folder / "tied",
        6,
        vocab_size=300,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        attention_bias=True,
        **small,
    )
    seven = [[5, 9, 12, 7], [3], [40, 41, 42, 43, 44], [60, 61], [8, 8, 8], [100], [7, 250, 31, 4, 4, 9]]
    cases = {
        "seven": {"model": "untied", "prompts": seven, "tokens": 10, "ends": []},
        "one": {"model": "untied", "prompts": seven[:1], "tokens": 6, "ends": []},
        "tied": {"model": "tied", "prompts": seven[:3], "tokens": 8, "ends": []},
        "drawn": {"model": "untied", "prompts": seven[:3], "tokens": 8, "ends": [], "options": ["generate.temperature=0.8"]},
        "adapter": {"model": "untied", "prompts": seven[:3], "tokens": 8, "ends": [], "options": [f"adapter.path={folder}/adapter"]},
    }  # fmt: skip
    texts = expected(model, seven, 10, [])
    # rows that end at different steps, one row a rank: each of these tokens ends one early
    cases["ends"] = {**cases["seven"], "ends": [texts[0][1], texts[1][7]], "rows": 1}
    parts = {name: (cases[name]["prompts"], cases[name]["tokens"], cases[name]["ends"]) for name in cases}
    wanted = {name: expected(model, *parts[name]) for name in ("seven", "one", "ends")}
    wanted["tied"] = expected(tied, *parts["tied"])
    drawn = GenerateConfig(max_new_tokens=8, temperature=0.8)
    ours = OurLlama.from_pretrained(folder / "untied")
    generator = Generator(ours, bytes_tokenizer(), drawn, Runtime("cpu", lazy=False), [])
    done = generator.run([Request(ids, place) for place, ids in enumerate(seven[:3])])
    wanted["drawn"] = [done[n].ids for n in range(3)]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder / "adapter")
    wanted["adapter"] = expected(adapted.eval(), *parts["adapter"])
    llama(
        folder / "large", 1, vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    cases["large"] = {"model": "large", "prompts": [[5, 6]], "tokens": 2, "ends": [], "only": "tensor"}
    (folder / "cases.json").write_text(json.dumps(cases))
    shared = run(warm_python, folder, 2, "data", "tensor", "zero3")
    (folder / "cases.json").write_text(json.dumps({"large": {**cases["large"], "only": "plain"}}))
    (single,) = run(warm_python, folder, 1, "plain")["plain large"]["bytes"].values()
    return wanted, shared, single


@pytest.mark.parametrize("mode", ["data", "tensor", "zero3"])
@pytest.mark.parametrize("case", ["seven", "one", "ends", "adapter", "tied", "drawn"])
def test_ids_on_two_ranks_are_those_of_one_process(outcomes, mode, case):
    wanted, shared, _ = outcomes
    assert shared[f"{mode} {case}"]["ids"] == wanted[case]
    if case == "ends":
        assert len({len(ids) for ids in wanted[case]}) > 1
    if case in ("adapter", "drawn"):
        assert wanted[case] != [ids[:8] for ids in wanted["seven"][:3]]


def test_tensor_parallel_halves_a_ranks_host_memory(outcomes):
    _, shared, single = outcomes
    assert single > 6 * (4 * 1024**2 - 2**20 + 3 * 4 * 1024**2) * 4  # the weights are in it
    for rank, peak in shared["tensor large"]["bytes"].items():
        assert peak <= 0.65 * single, (rank, peak, single)
