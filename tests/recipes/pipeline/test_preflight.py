import pytest

from recipes.pipeline.config import InputError
from recipes.pipeline.preflight import check_batch_sizes, plan, preflight
from recipes.pipeline.runtime import without_effect


def test_70b_without_cards_stops_with_what_is_missing_and_how_to_launch(run_recipe):
    done = run_recipe("+experiment=70b")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no Gaudi software here" in done.stderr
    assert "scripts/gaudi_spawn.py --world_size 8 --use_deepspeed recipes/lora.py +experiment=70b" in done.stderr


def test_70b_plan(run_recipe, tmp_path):
    done = run_recipe("+experiment=70b", "dry_run=true")
    assert done.returncode == 0
    out = done.stdout
    assert "10 rows x 1 accumulated x 8 rank(s) = 80 rows a step, up to 163,840 tokens" in out
    assert "PT_HPU_LAZY_MODE=1" in out and "PT_HPU_MAX_COMPOUND_OP_SIZE=10" in out
    assert "68,976,648,192, of which the adapter adds and trains 16,384,000" in out
    assert "25.04 GiB  kept for backward" in out and "16.06 GiB  weights" in out
    assert not list(tmp_path.rglob("*.yaml"))  # a plan leaves nothing behind


def test_a_run_of_other_ranks_than_its_cards(compose, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"runtime\.cards=4 but 2 rank"):
        preflight(compose("+experiment=tiny", "runtime=cpu", "runtime.cards=4"))


@pytest.mark.parametrize(
    ("given", "value"),
    [("train_batch_size", 4), ("train_micro_batch_size_per_gpu", 3), ("gradient_accumulation_steps", 5)],
)
def test_deepspeed_batch_numbers_that_disagree_name_the_factors(compose, given, value):
    cfg = compose("deepspeed=zero3", f"+deepspeed.{given}={value}", "train.per_device_train_batch_size=2")
    with pytest.raises(InputError) as error:
        check_batch_sizes(cfg, world_size=4)
    assert f"deepspeed.{given}={value}" in str(error.value)
    assert "per_device_train_batch_size 2 x gradient_accumulation_steps 1 x 4 ranks" in str(error.value)


def test_deepspeed_batch_numbers_that_agree(compose):
    check_batch_sizes(
        compose("deepspeed=zero3", "+deepspeed.train_batch_size=32", "+deepspeed.gradient_accumulation_steps=auto"), 4
    )


def test_steps_of_own_records_are_counted(compose, tmp_path):
    (tmp_path / "mine.json").write_text("[" + ",".join(['{"instruction": "a", "output": "b"}'] * 100) + "]")
    text = plan(
        compose(
            "+experiment=alpaca_smollm2", f"data.path={tmp_path / 'mine.json'}", "data.validation_split_percentage=10"
        )
    )
    assert "about 12: 1 epoch(s) of 90 records" in text


GAUDIS = [
    "runtime.use_fused_adam=true", "runtime.use_fused_clip_norm=true", "runtime.pipelining_fwd_bwd=true",
    "runtime.use_hpu_graphs_for_inference=true", "runtime.flash_attention_fast_softmax=true", "runtime.mark_step=true",
    "runtime.layers_per_mark_step=2", "+runtime.environment={PT_HPU_MAX_COMPOUND_OP_SIZE: '10', MY_OWN: '1'}",
]  # fmt: skip
IDLE = (
    "runtime.flash_attention_fast_softmax, runtime.use_fused_adam, runtime.use_fused_clip_norm, runtime.pipelining_fwd_bwd,"
    " runtime.use_hpu_graphs_for_inference, runtime.environment.PT_HPU_MAX_COMPOUND_OP_SIZE, runtime.mark_step,"
    " runtime.layers_per_mark_step"
)


def test_options_of_a_card_are_named_where_there_is_none(run_recipe, compose):
    """An experiment of a card can be tried here, and says once what of it is passed over."""
    short = ["+experiment=tiny", "train.do_train=false", "data.max_eval_samples=2"]
    done = run_recipe(*short, *GAUDIS, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"warning       on cpu these have no effect: {IDLE}\n")
    assert done.stderr.count("no effect") == 1
    assert f"no effect     {IDLE}\n" in plan(compose("+experiment=tiny", *GAUDIS))


@pytest.mark.parametrize(
    ("overrides", "kind", "lazy", "named"),
    [
        (["runtime=auto", *GAUDIS], "hpu", True, []),
        (["runtime=auto"], "cuda", False, []),
        (["runtime=cpu_lazy", "runtime.layers_per_mark_step=1", "runtime.mark_step=true"], "lazy", True, []),
        (["runtime=cpu", GAUDIS[-1]], "cpu", False, ["runtime.environment.PT_HPU_MAX_COMPOUND_OP_SIZE"]),
    ],
)
def test_an_option_is_named_only_where_it_has_no_effect(compose, overrides, kind, lazy, named):
    assert without_effect(compose("+experiment=tiny", *overrides).runtime, kind, lazy) == named
