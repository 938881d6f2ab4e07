"""LoRA: what is trained, what is saved, and what is refused; against stock PEFT."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama

from modeling.llama import LlamaForCausalLM
from recipes.pipeline.adapter import add_adapter, describe_model, save_adapter, trainable_counts
from recipes.pipeline.config import InputError

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
IDS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))


def base(kind=LlamaForCausalLM, **fields):
    torch.manual_seed(3)
    return kind(LlamaConfig(**{**TINY, **fields})).eval()


@pytest.fixture
def adapted(compose):
    def build(*overrides, model=None):
        return add_adapter(model or base(), compose("adapter.r=4", *overrides)).eval()

    return build


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    return model


def test_counts_and_default_targets(adapted):
    model = adapted("adapter.target_modules=[q_proj,v_proj]")
    assert trainable_counts(model) == (896, 23_584)
    assert "LoRA r=4 on q_proj, v_proj, float32: trains 896 of 23,584 parameters (3.80 %)" in describe_model(model)
    everything = adapted()
    names = {name.split(".lora_")[0] for name, _ in everything.named_parameters() if "lora_" in name}
    assert len(names) == 14 and not any("lm_head" in name for name in names)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["adapter.use_rslora=true"],
        ["adapter.use_dora=true"],
        ["adapter.modules_to_save=[embed_tokens]"],
        ["+adapter.rank_pattern={q_proj: 2}", "+adapter.alpha_pattern={q_proj: 8.0}"],
    ],
)
def test_stock_peft_on_stock_llama_loads_what_is_saved(adapted, tmp_path, overrides):
    model = randomize(adapted(*overrides))
    save_adapter(model, tmp_path / "a")
    json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    stock = PeftModel.from_pretrained(base(StockLlama), tmp_path / "a").eval()
    torch.testing.assert_close(stock(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)
    merged = stock.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, model(input_ids=IDS).logits, rtol=1e-3, atol=1e-3)
    again = adapted("train.do_train=false", f"adapter.path={tmp_path / 'a'}")
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert (again(input_ids=IDS).logits - base()(IDS).logits).abs().max() > 0.01
    if "modules_to_save" in str(overrides):
        assert any(t.shape == (64, 32) for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values())


def test_a_finished_adapter_can_be_trained_on(adapted, tmp_path):
    save_adapter(randomize(adapted()), tmp_path / "a")
    model = adapted(f"adapter.path={tmp_path / 'a'}")
    assert trainable_counts(model)[0] > 0 and "weights from" in describe_model(model)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["adapter.target_modules=[q_proj,v_prj]"], "'v_prj' matches no module; did you mean v_proj"),
        (["adapter.modules_to_save=[embed]"], "'embed' matches no module"),
        (["+adapter.rank_pattern={qproj: 2}"], "rank_pattern: 'qproj' matches no linear module"),
        (["adapter.path=nowhere"], "no such folder"),
    ],
)
def test_names_that_match_nothing(adapted, overrides, said):
    with pytest.raises(InputError, match=said):
        adapted(*overrides)


def test_adapters_that_do_not_fit_are_refused(adapted, tmp_path):
    save_adapter(randomize(adapted()), tmp_path / "a")
    use = f"adapter.path={tmp_path / 'a'}"
    with pytest.raises(InputError, match="of another base model"):
        adapted(use, model=base(hidden_size=64, num_attention_heads=8))
    with pytest.raises(InputError, match=r"of another base model: target_modules: 'model\.layers\.1"):
        adapted(use, model=base(num_hidden_layers=1))
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(InputError, match="28 keys missing, 28 unknown; first: missing base_model"):
        adapted(use)
    save_file({}, file)
    with pytest.raises(InputError, match="holds no tensors"):
        adapted(use)
    file.write_bytes(b"short")
    with pytest.raises(InputError, match="damaged"):
        adapted(use)
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(InputError, match=r"no adapter_config\.json"):
        adapted(use)


def test_an_adapter_knows_its_base_by_its_weights(adapted, tmp_path, capsys):
    """Not by a name: a folder is moved, and another model of the same shape may lie where the first one was."""

    def named(name):
        model = base()
        model.name_or_path = model.config._name_or_path = name
        return model

    save_adapter(randomize(adapted(model=named("models/first"))), tmp_path / "a")
    use = f"adapter.path={tmp_path / 'a'}"
    adapted(use, model=named("elsewhere/renamed").to(torch.bfloat16))
    assert capsys.readouterr().err == ""
    other = named("models/first")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.02)
    adapted(use, model=other)
    assert capsys.readouterr().err.startswith(
        f"warning: adapter {tmp_path / 'a'} was trained on other weights than those here"
    )
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file(load_file(file), file)  # as PEFT writes it: without a mark, so the names decide
    adapted(use, model=named("elsewhere/renamed"))
    assert "was trained on first, the model here is renamed" in capsys.readouterr().err


def test_an_empty_adapter_is_never_written(adapted, tmp_path):
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="saved empty"):
        save_adapter(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_of_a_real_shape_is_its_adapter_three_times(tiny):
    smollm2 = {  # a fifth of its layers
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    shape = [f"model.config.{name}={size}" for name, size in smollm2.items()]
    run = tiny(
        *shape, "+model.config.tie_word_embeddings=true", "adapter.r=8", "train.do_eval=false", "train.eval_strategy=no",
        "train.max_steps=1", "train.per_device_train_batch_size=1", "train.save_strategy=steps", "train.save_steps=1",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    folder = run.folder / "checkpoint-1"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    adapter = sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())
    base = 49152 * 576 + 6 * 3_540_096
    assert size < 3 * 4 * adapter + 1e6 < 0.1 * 4 * base  # weights and Adam's two moments, of a float32 base


def test_dtypes_of_the_adapter(adapted, tmp_path):
    model = adapted(model=base().to(torch.bfloat16))
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    model = adapted("adapter.dtype=bfloat16", model=base().to(torch.bfloat16))
    save_adapter(randomize(model), tmp_path / "a")
    assert {t.dtype for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_adapters_start_equal_whatever_came_before(adapted):
    torch.manual_seed(1)
    first = adapted()
    torch.manual_seed(2)
    second = adapted()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
