"""Shares of a model; tensor parallelism itself runs in test_generation_ranks.py."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pipeline.config import InputError
from recipes.pipeline.tensor_parallel import Shares, narrowed

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("ranks", "said"), [(3, "num_attention_heads 4"), (4, "num_key_value_heads 2"), (8, "num_attention_heads 4")]
)
def test_ranks_that_do_not_divide_the_model(ranks, said):
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(InputError, match=f"generate.tensor_parallel={ranks} does not divide the model's {said}"):
        narrowed(config, ranks)


def test_shares_of_an_adapter_and_of_what_cannot_be_shared():
    second = Shares(1, 2)
    whole = torch.arange(24.0).view(4, 6)
    assert torch.equal(second.part("a.q_proj.lora_B.weight", whole), whole[2:])
    assert torch.equal(second.part("a.q_proj.lora_A.weight", whole), whole)
    assert torch.equal(second.part("a.down_proj.lora_A.default.weight", whole), whole[:, 3:])
    assert torch.equal(second.part("a.o_proj.bias", whole[0]), torch.zeros(6))
    with pytest.raises(InputError, match="vocabulary's tables"):
        second.part("a.lm_head.lora_A.weight", whole)
    with pytest.raises(InputError, match="DoRA"):
        second.part("a.q_proj.lora_magnitude_vector.weight", whole)


@pytest.mark.benchmark
def test_a_step_is_no_slower_than_dtensors_and_deepspeeds_and_a_rank_needs_less(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    seen = {way: [] for way in ("ours", "dtensor", "deepspeed")}
    for turn in range(3):
        for way, results in seen.items():
            result = tmp_path / f"{way}{turn}.json"
            command = [
                sys.executable, REPOSITORY / "scripts" / "gaudi_spawn.py", "--world_size", "2",
                REPOSITORY / "tests" / "recipes" / "pipeline" / "tensor_parallel_ways.py", way, tmp_path / "model", result,
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-2000:]
            results.append(json.loads(result.read_text()))
    for way, results in seen.items():
        print(way, *(f"{r['step'] * 1000:.0f} ms {r['peak'] / 2**20:.0f} MiB" for r in results))
    for way in ("dtensor", "deepspeed"):
        ratios = [own["step"] / other["step"] for own, other in zip(seen["ours"], seen[way], strict=True)]
        print(f"step of ours against {way}: {statistics.median(ratios):.2f}")
        assert statistics.median(ratios) <= 1.05
        assert all(own["ids"] == other["ids"] for own, other in zip(seen["ours"], seen[way], strict=True))
        assert max(r["peak"] for r in seen["ours"]) < 0.75 * min(r["peak"] for r in seen[way])
