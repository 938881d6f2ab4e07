"""Each experiment composes and plans; the 70b experiment is the measured run, key by key."""

import json
import re
from pathlib import Path

import pytest

from recipes.pipeline.preflight import plan, shape_of
from recipes.pipeline.runtime import Runtime, environment

REPOSITORY = Path(__file__).resolve().parents[2]
FACTS = json.loads((REPOSITORY / "tests" / "facts.json").read_text())["training_llama2_70b_lora_8_gaudi2"]
EXPERIMENTS = sorted(path.stem for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"))
GENERATION = {"70b_generate", "70b_generate_no_flash"}  # of recipes/generate.py only; the others serve both recipes


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_plans_and_says_its_command(compose, name):
    header = (REPOSITORY / "conf" / "experiment" / f"{name}.yaml").read_text()
    assert header.startswith("# @package _global_\n# ")
    assert "# Cards:" in header
    generating = plan(compose(f"+experiment={name}", "dry_run=true", root="generate"))
    assert "GiB a card" in generating and "group(s) of ranks" in generating
    if name in GENERATION:
        assert f"recipes/generate.py +experiment={name}" in header
    else:
        text = plan(compose(f"+experiment={name}"))
        assert "GiB a card" in text and "rows a step" in text
        assert f"recipes/lora.py +experiment={name}" in header


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPOSITORY / "conf" / "model").glob("*.yaml")))
def test_every_model_has_a_shape_for_plans(compose, name):
    assert shape_of(compose(f"model={name}")).hidden_size > 0


@pytest.fixture
def measured(compose):
    pytest.importorskip("deepspeed")
    from recipes.pipeline.trainer import deepspeed_config, gaudi_options, trainer_options

    cfg = compose("+experiment=70b")
    runtime = Runtime("hpu", lazy=True, world_size=8)
    options = trainer_options(cfg, runtime, Path("out")) | gaudi_options(cfg, lazy=True)
    return cfg, options, deepspeed_config(cfg)


def test_70b_is_the_measured_run_key_by_key(measured):
    cfg, options, zero = measured
    facts = dict(FACTS["arguments"])
    trainer_keys = {
        "bf16 num_train_epochs per_device_train_batch_size per_device_eval_batch_size gradient_checkpointing eval_delay"
        " save_strategy learning_rate warmup_ratio lr_scheduler_type logging_steps use_habana use_lazy_mode"
        " pipelining_fwd_bwd throughput_warmup_steps do_train do_eval"
    }
    for key in " ".join(trainer_keys).split():
        assert options[key] == facts.pop(key), key
    assert options["eval_strategy"] == facts.pop("evaluation_strategy")  # renamed in transformers 4.46
    assert Path(cfg.model.name_or_path).name == facts.pop("model")
    assert cfg.data.path == facts.pop("dataset_name")
    assert cfg.data.validation_split_percentage == facts.pop("validation_split_percentage")
    assert (cfg.data.batching.name == "concatenated") is facts.pop("dataset_concatenation")
    assert cfg.data.max_seq_length == facts.pop("max_seq_len")
    assert cfg.runtime.attn_softmax_bf16 is facts.pop("attn_softmax_bf16")
    assert (cfg.runtime.attention.name == "fused_sdpa") is facts.pop("use_flash_attention")
    assert cfg.adapter.r == facts.pop("lora_rank")
    assert cfg.adapter.target_modules == facts.pop("lora_target_modules")
    assert cfg.runtime.cards == facts.pop("world_size")
    said = facts.pop("deepspeed")
    assert said == (
        f"ZeRO stage {zero['zero_optimization']['stage']}, bf16, gradient_clipping {zero['gradient_clipping']},"
        " overlap_comm false, contiguous_gradients false, stage3_gather_16bit_weights_on_model_save true"
    )
    assert zero["bf16"]["enabled"] is True
    assert zero["zero_optimization"]["overlap_comm"] is False
    assert zero["zero_optimization"]["contiguous_gradients"] is False
    assert zero["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert not facts, f"not compared: {sorted(facts)}"


def test_70b_keeps_the_quirks_and_the_scripts_own_defaults(measured):
    cfg, options, _ = measured
    assert (cfg.data.loss_on.name, cfg.data.holdout.name, cfg.data.template.name) == ("all", "first", "alpaca_joined")
    assert (cfg.adapter.lora_alpha, cfg.adapter.lora_dropout) == (16, 0.05)
    assert (options["max_grad_norm"], options["weight_decay"], options["seed"]) == (1.0, 0.0, 42)
    assert options["adam_epsilon"] == 1e-6  # optimum-habana's default
    assert (cfg.runtime.use_fused_adam, cfg.runtime.use_fused_clip_norm) == (True, True)
    assert options["gradient_checkpointing_kwargs"] == {"use_reentrant": True}  # DeepSpeed's checkpoint re-enters


def test_70b_sets_the_measured_environment(measured):
    cfg, _, _ = measured
    variables = environment(cfg, "hpu", lazy=True)
    assert FACTS["environment"].items() <= variables.items()
    assert variables["PT_HPU_LAZY_MODE"] == "1"


@pytest.mark.parametrize("which", ["before", "after"])
def test_the_named_baselines_hold_the_measured_figures(compose, which):
    cfg = compose(f"baseline=gaudi2_70b_{which}")
    assert cfg.baseline.metrics == FACTS[which]


def test_the_tolerances_pass_the_measured_pair_and_refuse_others(compose):
    from recipes.pipeline.metrics import compare_with_baseline

    baseline = compose("baseline=gaudi2_70b_after").baseline

    def outside(results):
        return [
            line for line in compare_with_baseline(results, baseline.metrics, baseline.tolerance) if "OUTSIDE" in line
        ]

    assert outside(FACTS["before"]) == []
    assert outside({"eval_loss": 0.70}) and outside({"eval_loss": 0.7655})


INFERENCE = json.loads((REPOSITORY / "tests" / "facts.json").read_text())["inference_llama2_70b_8_cards_bf16"]


@pytest.mark.parametrize("name", sorted(GENERATION))
def test_70b_generate_is_the_measured_inference(compose, name):
    cfg = compose(f"+experiment={name}", root="generate")
    assert cfg.generate.batch_size == INFERENCE["batch_size"]
    assert cfg.generate.max_prompt_tokens == cfg.generate.length_bucket == INFERENCE["sequence_length"]
    assert cfg.model.shape["hidden_size"] == INFERENCE["hidden_size"]
    assert (cfg.runtime.cards, cfg.generate.tensor_parallel, cfg.model.dtype.name) == (8, 8, "bfloat16")
    assert (cfg.runtime.attention.name == "fused_sdpa") is (name == "70b_generate")
    # graph breaks and the in-place add are on: both follow lazy execution and the gate
    assert (cfg.runtime.lazy, cfg.runtime.mark_step, cfg.runtime.in_place_residual) == (True, None, None)
    # what collectives inside HPU graphs need is set wherever several cards run such graphs
    assert environment(cfg, "hpu", lazy=True)["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "true"
    cfg.runtime.cards = 1
    assert "PT_HPU_ENABLE_LAZY_COLLECTIVES" not in environment(cfg, "hpu", lazy=True)


def test_the_plan_of_70b_generate_by_hand(compose):
    from recipes.pipeline.memory_plan import main_plan

    cfg = compose("+experiment=70b_generate", "dry_run=true", root="generate")
    static = main_plan(cfg).static
    # Llama-2-70B: 80 layers, one of 8 key/value heads a card, head dim 128, bf16; the cache counts its tokens in a tensor
    assert 0 <= static["KV cache"] - 172 * (2048 + 128) * 80 * 2 * 1 * 128 * 2 < 1024**2
    assert static["weights"] == pytest.approx(68_976_648_192 * 2 // 8, rel=1e-3)
    text = plan(cfg)
    assert "172 rows x 1 group(s) of ranks, 8 ranks share a model; up to 2,048 + 128 tokens" in text
    assert "fits on Gaudi2 (94.6 GiB)" in text


DEEPSPEED = {path.stem: path for path in (REPOSITORY / "conf" / "deepspeed").glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(DEEPSPEED))
def test_each_value_of_deepspeeds_files_is_explained(name):
    lines = DEEPSPEED[name].read_text().splitlines()
    assert lines[0].startswith("# ")
    bare = [line for line in lines if re.match(r" *[\w]+: +[^# ]", line) and " # " not in line]
    assert not bare


def test_stage_3_gathers_our_own_layer_but_in_the_measured_configuration(compose):
    from modeling.llama import LlamaDecoderLayer

    for name in sorted(DEEPSPEED):
        zero = compose(f"deepspeed={name}").deepspeed.get("zero_optimization", {})
        classes = zero.get("leaf_module", {}).get("classes", [])
        own = zero.get("stage") == 3 and name != "zero3_70b"
        assert classes == ([LlamaDecoderLayer.__name__] if own else []), name
    assert "No leaf_module" in DEEPSPEED["zero3_70b"].read_text()
