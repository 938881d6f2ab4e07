"""Training as a user starts it: losses, schedules, saves and resumes, over ranks, micro-batches and ZeRO stages."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

REPOSITORY = Path(__file__).resolve().parents[3]
DEEPSPEED = ("--use_deepspeed",)


def close(one, other, tolerance=1e-5):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)


def adapter_is_whole(folder: Path, targets: int = 14, rank: int = 4):
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * targets
    for name, tensor in tensors.items():
        assert tensor.numel() and rank in tensor.shape
        if "lora_B" in name:
            assert tensor.abs().sum() > 0, name
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and isinstance(config["target_modules"], list)


@pytest.fixture(scope="module")
def plain(tiny):
    run = tiny("train.save_strategy=steps", "train.save_steps=3", "adapter.lora_dropout=0.1")
    assert run.returncode == 0, run.stderr
    return run


def test_a_run_leaves_what_it_promises(plain):
    names = {path.name for path in plain.folder.iterdir()}
    assert {"config.yaml", "versions.json", "data.json", "log.jsonl", "loss.png", "adapter"} <= names
    assert {"train_results.json", "eval_results.json", "all_results.json", "checkpoint-3", "checkpoint-6"} <= names
    adapter_is_whole(plain.folder / "adapter")
    assert "base_model:" in (plain.folder / "adapter" / "README.md").read_text()
    assert (plain.folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    facts = json.loads((REPOSITORY / "tests" / "facts.json").read_text())["training_llama2_70b_lora_8_gaudi2"]["after"]
    assert set(facts) <= set(plain.results)
    assert {"eval_loss_before", "eval_targets", "train_tokens_per_second"} <= set(plain.results)
    assert plain.results["perplexity"] == pytest.approx(math.exp(plain.results["eval_loss"]))
    versions = json.loads((plain.folder / "versions.json").read_text())
    assert versions["torch"] == torch.__version__.split("+")[0] or versions["torch"] == torch.__version__
    for line in ("eval loss", "results", "adapter", "evaluate it"):
        assert line in plain.stdout
    assert "trains" in plain.stdout and "sample 1" in plain.stdout and "backend gloo" in plain.stdout


def test_every_checkpoint_holds_the_whole_adapter_and_no_base_weights(plain):
    for step in (3, 6):
        folder = plain.folder / f"checkpoint-{step}"
        adapter_is_whole(folder)
        assert not list(folder.glob("model*.safetensors")) + list(folder.glob("pytorch_model*"))


def test_the_learning_rate_follows_the_formula(plain):
    series = plain.series("learning_rate")
    close(series, [0.01 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])


@pytest.fixture(scope="module")
def batch_of_four(tiny):
    run = tiny("train.per_device_train_batch_size=4")
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.parametrize("split", [(1, 4), (2, 2)])
def test_loss_norm_and_schedule_do_not_depend_on_accumulation(tiny, batch_of_four, split):
    micro, steps = split
    parts = tiny(
        f"train.per_device_train_batch_size={micro}",
        f"train.gradient_accumulation_steps={steps}",
    )
    for key in ("loss", "learning_rate", "eval_loss"):
        close(parts.series(key), batch_of_four.series(key))
    close(parts.series("grad_norm"), batch_of_four.series("grad_norm"), 1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "launcher"), [("none", ()), ("zero3", DEEPSPEED)])
def test_two_launched_ranks_equal_one(tiny, batch_of_four, stage, launcher):
    options = ["train.per_device_train_batch_size=2", "train.per_device_eval_batch_size=3", f"deepspeed={stage}"]
    two = tiny(*options, "train.save_strategy=steps", "train.save_steps=3", ranks=2, launcher=launcher)
    assert two.returncode == 0, two.stderr
    one = batch_of_four
    for key in ("loss", "learning_rate", "eval_loss"):
        close(two.series(key), one.series(key))
    close(two.series("grad_norm"), one.series("grad_norm"), 1e-4)
    for folder in ("adapter", "checkpoint-3", "checkpoint-6"):
        adapter_is_whole(two.folder / folder)
    saved, alone = (load_file(run.folder / "adapter" / "adapter_model.safetensors") for run in (two, one))
    for name, tensor in alone.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-4)
    assert two.results["eval_samples"] == one.results["eval_samples"]


@pytest.mark.distributed
def test_zero3_in_bfloat16_with_checkpointing_resumes_and_keeps_the_base(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    options = [
        "deepspeed=zero3",
        "model.dtype=bfloat16",
        "train.gradient_checkpointing=true",
        "train.save_strategy=steps",
    ]
    whole = tiny(*options, "train.save_steps=3", launcher=DEEPSPEED)
    assert whole.returncode == 0, whole.stderr
    folder = whole.folder.parent / "resumed"
    again = tiny(
        *options, f"train.resume_from_checkpoint={whole.folder / 'checkpoint-3'}", launcher=DEEPSPEED, folder=folder
    )
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in again.log if "loss" in record] == [4, 5, 6]
    close(again.series("loss"), whole.series("loss")[3:], 1e-2)
    adapter_is_whole(folder / "adapter")
    other = tiny("deepspeed=zero2", f"train.resume_from_checkpoint={whole.folder / 'checkpoint-3'}", launcher=DEEPSPEED)
    assert other.returncode == 2 and "zero_stage 3, this run has 2" in other.stderr
    assert not (tmp_path / "extensions").exists()  # nothing was compiled


def test_a_resumed_run_goes_on_exactly(tiny, plain):
    copied = plain.folder.parent / "killed"
    shutil.copytree(plain.folder, copied)
    for name in ("adapter", "checkpoint-6", "all_results.json", "config.yaml"):
        path = copied / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copied / "checkpoint-5").mkdir()
    (copied / "checkpoint-5" / "trainer_state.json").write_text('{"global_st')  # killed while saving
    again = tiny("adapter.lora_dropout=0.1", "train.resume_from_checkpoint=last", folder=copied)
    assert again.returncode == 0, again.stderr
    close(again.series("loss"), plain.series("loss"))
    close(again.series("learning_rate"), plain.series("learning_rate"))
    assert [record["step"] for record in again.log if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert again.results["eval_loss_before"] == pytest.approx(plain.results["eval_loss_before"])


def test_finished_taken_and_missing_runs_are_refused(tiny, plain):
    before = (plain.folder / "all_results.json").read_bytes()
    for overrides, said in (
        (["train.resume_from_checkpoint=last"], "already reached the last step"),
        ([], "already holds a run"),
    ):
        run = tiny("adapter.lora_dropout=0.1", *overrides, folder=plain.folder)
        assert run.returncode == 2 and said in run.stderr and "Traceback" not in run.stderr
    run = tiny("train.resume_from_checkpoint=last")
    assert run.returncode == 2 and "no finished checkpoint" in run.stderr
    assert (plain.folder / "all_results.json").read_bytes() == before


def test_evaluation_of_a_finished_adapter_gives_the_runs_own_loss(tiny, plain):
    run = tiny("train.do_train=false", f"adapter.path={plain.folder / 'adapter'}")
    assert run.results["eval_loss"] == pytest.approx(plain.results["eval_loss"], abs=1e-5)
    assert f"weights from {plain.folder / 'adapter'}" in run.stdout
    base = tiny("train.do_train=false")
    assert base.results["eval_loss"] == pytest.approx(plain.results["eval_loss_before"], abs=1e-5)


def test_the_best_checkpoint_is_the_one_that_is_kept(tiny):
    # a rate that is far too high after the first steps: an early evaluation is the best one
    run = tiny(
        "train.learning_rate=0.5", "train.lr_scheduler_type=constant", "train.eval_steps=2", "train.save_steps=2",
        "train.save_strategy=steps", "train.load_best_model_at_end=true", "train.eval_on_start=false",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    steps = {
        record["step"]: record["eval_loss"] for record in run.log if "eval_loss" in record and record["step"] in (2, 4)
    }
    final = [record["eval_loss"] for record in run.log if "eval_loss" in record]
    best = min(final)
    assert run.results["eval_loss"] == pytest.approx(best, abs=1e-5) and steps
    step = next(record["step"] for record in run.log if record.get("eval_loss") == best)
    kept, saved = (load_file(run.folder / f / "adapter_model.safetensors") for f in ("adapter", f"checkpoint-{step}"))
    assert all(torch.equal(kept[name], saved[name]) for name in kept)


def test_a_nan_stops_the_run_with_its_step(tiny):
    run = tiny("train.learning_rate=1e30", "train.max_grad_norm=1e30", "train.eval_strategy=no")
    assert run.returncode == 2
    assert "training loss is nan at step " in run.stderr.lower() and "Traceback" not in run.stderr
    assert not (run.folder / "all_results.json").exists() and not (run.folder / "adapter").exists()


@pytest.mark.parametrize("batching", ["padded", "concatenated", "packed"])
def test_every_batching_trains(tiny, batching):
    run = tiny(
        f"data.batching={batching}", "train.max_steps=2", "train.eval_strategy=no", "train.gradient_checkpointing=true"
    )
    assert run.returncode == 0, run.stderr
    assert all(math.isfinite(loss) for loss in run.series("loss") + run.series("eval_loss"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_loss(tiny, plain, reentrant):
    run = tiny(
        "adapter.lora_dropout=0.1",
        "train.gradient_checkpointing=true",
        f"train.gradient_checkpointing_use_reentrant={reentrant}",
    )
    close(run.series("loss"), plain.series("loss"), 1e-6)


def test_loader_workers_change_no_loss(tiny, plain):
    run = tiny("adapter.lora_dropout=0.1", "train.dataloader_num_workers=2", "train.max_steps=6")
    close(run.series("loss"), plain.series("loss"), 1e-6)


@pytest.mark.slow
def test_torchs_lazy_engine_trains_to_the_same_losses(tiny):
    eager, lazy = tiny(), tiny("runtime=cpu_lazy")
    assert lazy.returncode == 0, lazy.stderr
    for key in ("loss", "eval_loss"):
        close(lazy.series(key), eager.series(key))


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_losses(tiny):
    shape = ["data.pad_to_max_length=true", "data.max_seq_length=256", "train.max_steps=3"]
    eager = tiny(*shape)
    compiled = tiny(*shape, "runtime.compile=true", "runtime.compile_backend=aot_eager")
    assert compiled.returncode == 0, compiled.stderr
    for key in ("loss", "eval_loss"):
        close(compiled.series(key), eager.series(key))
    adapter_is_whole(compiled.folder / "adapter")


def test_stock_llama_trains_to_the_same_losses(tiny):
    ours, stock = tiny(), tiny("model.implementation=stock")
    assert stock.returncode == 0, stock.stderr
    for key in ("loss", "eval_loss", "eval_accuracy", "eval_targets"):
        close(ours.series(key), stock.series(key))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.path=nowhere.json"], "nowhere.json"),
        (["adapter.target_modules=[q_proj,v_prj]"], "'v_prj' matches no module; did you mean v_proj"),
        (["data.max_seq_length=4096"], "above the model's max_position_embeddings 1024"),
        (["train.do_train=false", "adapter.path=nowhere"], "adapter.path=nowhere: no such folder"),
        (["model.config.num_key_value_heads=3"], "4 is not a multiple of num_key_value_heads 3"),
        (["model.config.vocab_size=200"], "the model's vocabulary is 200"),
        (["+model.config.hiden_size=3"], "LlamaConfig has no such field"),
        (["runtime=cuda"], "0 CUDA cards here"),
    ],
)
def test_bad_input_ends_in_one_line_and_leaves_nothing(tiny, overrides, said):
    run = tiny(*overrides)
    assert run.returncode == 2
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0] and "Traceback" not in run.stderr, run.stderr
    assert not (run.folder / "adapter").exists() and not (run.folder / "all_results.json").exists()


# The real small model


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("side", ["left", "right"])
def test_four_texts_evaluate_to_the_known_loss(batch, side):
    from evaluate_texts import evaluate

    found = evaluate([f"train.per_device_eval_batch_size={batch}", f"data.padding_side={side}"], [0, 1, 2, 3])
    assert found["eval_loss"] == pytest.approx(2.85270, abs=2e-5)
    assert found["perplexity"] == pytest.approx(17.3345, abs=5e-4)
    assert (found["eval_targets"], found["eval_samples"]) == (33, 4)


def on_two_ranks(python: str, *arguments: str):
    command = [python, REPOSITORY / "scripts/gaudi_spawn.py", "--world_size", "2"]
    program = Path(__file__).parent / "evaluate_texts.py"
    done = subprocess.run([*command, program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "FIGURES " in line)
    return json.loads(line.split("FIGURES ", 1)[1])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("texts", "overrides", "expected", "samples"),
    [
        ("0 1 2 3", ["train.per_device_eval_batch_size=1", "data.padding_side=left"], 2.85270, 4),
        ("0 1 2", ["train.per_device_eval_batch_size=2"], 2.83535, 3),
        ("0", ["deepspeed=zero3"], 1.81065, 1),
    ],
)
def test_texts_on_two_ranks(texts, overrides, expected, samples, warm_python):
    found = on_two_ranks(warm_python, *overrides, "--texts", *texts.split())
    assert found["eval_loss"] == pytest.approx(expected, abs=2e-5)
    assert (found["eval_samples"], found["backend"]) == (samples, "gloo")


@pytest.mark.slow
def test_a_single_target_is_said(monkeypatch):
    from evaluate_texts import evaluate

    found = evaluate([], [1])
    assert found["eval_loss"] == pytest.approx(4.41669, abs=2e-5) and found["eval_targets"] == 1
