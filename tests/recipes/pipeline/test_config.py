import pytest

from recipes.pipeline.config import InputError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["runtime.compile=true", "runtime.lazy=true"], "exclude each other"),
        (["runtime=cpu", "runtime.mark_step=true"], "runtime.mark_step"),
        (["runtime=cpu", "runtime.pipelining_fwd_bwd=true"], "lazy mode only"),
        (["runtime=gaudi_eager", "runtime.use_hpu_graphs_for_inference=true"], "lazy mode only"),
        (["runtime.attention=sdpa", "runtime.flash_attention_recompute=true"], "fused_sdpa"),
        (["runtime=cpu", "runtime.flash_attention_recompute=true"], "needs runtime.attention=fused_sdpa"),
        (
            [
                "runtime=gaudi_lazy",
                "runtime.flash_attention_recompute=true",
                "runtime.flash_attention_fast_softmax=true",
            ],
            "leave one out",
        ),
        (["runtime=cpu", "runtime.layers_per_mark_step=2"], "runtime.layers_per_mark_step=2 breaks lazy graphs"),
        (["runtime.compile=true", "runtime.mark_step=true"], "runtime.mark_step"),
        (["+runtime.environment.PT_HPU_LAZY_MODE='1'"], "runtime.lazy"),
        (["+deepspeed.scheduler={type: WarmupLR}"], "deepspeed.scheduler"),
        (["+deepspeed.optimizer={type: Adam}"], "deepspeed.optimizer"),
        (["deepspeed=zero3", "deepspeed.zero_optimization.stage=4"], "takes 0, 1, 2 or 3"),
        (["deepspeed=zero3", "runtime=cpu_lazy"], "lazy engine"),
        (["train.max_steps=0"], "trains nothing"),
        (["train.gradient_accumulation_steps=0"], "train.gradient_accumulation_steps=0: takes 1 or more"),
        (["data.validation_split_percentage=100"], "100"),
        (["data.validation_split_percentage=0"], "nothing to evaluate"),
        (["adapter=none"], "nothing to train"),
        (["adapter.lora_dropout=1.5"], "adapter.lora_dropout=1.5"),
        (["train.eval_strategy=steps"], "train.eval_steps"),
        (["train.load_best_model_at_end=true"], "train.save_strategy and train.eval_strategy"),
        (["train.do_train=false", "train.do_eval=false"], "nothing to do"),
        (["samples=-1"], "samples=-1: takes 0 or more"),
        (["sample_tokens=0"], "sample_tokens=0: takes 1 or more"),
        (["samples=2", "train.do_eval=false", "data.validation_split_percentage=0"], "none is held out"),
        (["train.do_train=false", "train.resume_from_checkpoint=last"], "adapter.path=CHECKPOINT"),
        (["model.name_or_path=random"], "model.config"),
        (["+model.config={hidden_size: 8}"], "model.name_or_path=random"),
    ],
)
def test_broken_rules_between_fields_are_named(compose, overrides, said):
    with pytest.raises(InputError, match=said) as error:
        compose(*overrides)
    assert "\n" not in str(error.value)


def test_numbers_and_switches_have_their_types(compose):
    cfg = compose("train.learning_rate=1e-4", "train.do_eval=False", "train.eval_on_start=false")
    assert cfg.train.learning_rate == 0.0001
    assert isinstance(cfg.train.learning_rate, float)
    assert cfg.train.do_eval is False and cfg.train.eval_on_start is False


def test_nothing_of_omegaconf_is_left(compose):
    cfg = compose("adapter.target_modules=[q_proj,v_proj]", "+adapter.rank_pattern={q_proj: 2}", "deepspeed=zero3")
    assert type(cfg.adapter.target_modules) is list
    assert type(cfg.adapter.rank_pattern) is dict
    assert type(cfg.deepspeed["zero_optimization"]) is dict


@pytest.mark.parametrize("device", ["cpu", "cuda", "lazy"])
def test_gaudis_optimizer_is_refused_elsewhere(compose, device):
    with pytest.raises(InputError, match=f"use_fused_adam=true is Gaudi's; leave it out with runtime.device={device}"):
        compose("+experiment=tiny", f"runtime.device={device}", "runtime.use_fused_adam=true")
