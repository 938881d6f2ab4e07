"""Training on two ranks in each engine, all in one start of the processes: one rank's numbers, its saves and resumes."""

import json
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock
from safetensors import safe_open

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("train_on_ranks.py")
LAUNCHER = REPOSITORY / "scripts" / "gaudi_spawn.py"
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# Layers that are wide beside their adapters, as real ones are
COMMON = [
    "model.config.intermediate_size=2048", "adapter.target_modules=[q_proj,v_proj]", "train.max_steps=3",
    "train.weight_decay=0.01", "train.lr_scheduler_type=linear", "train.eval_steps=2", "train.save_strategy=steps", "train.save_steps=2",
]  # fmt: skip
HALF = ["train.per_device_train_batch_size=2", "train.per_device_eval_batch_size=2"]
CHECKPOINTING = "train.gradient_checkpointing=true"
REENTRANT = "train.gradient_checkpointing_use_reentrant=true"
CASES = {
    "none": ["train.dataloader_num_workers=2"],
    "zero0": ["deepspeed=zero0", CHECKPOINTING],
    "zero0 re-entrant": ["deepspeed=zero0", CHECKPOINTING, REENTRANT],
    "zero2": ["deepspeed=zero2"],
    "zero3": ["deepspeed=zero3", CHECKPOINTING],
    "zero3 re-entrant": ["deepspeed=zero3", CHECKPOINTING, REENTRANT],
}


@pytest.fixture(scope="session")
def ranks(records, one_for_all, warm_python):
    """(folder of the runs, {case: what each rank found}); started once for all test workers."""
    folder = one_for_all / "trained_on_ranks"
    folder.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            fixed = ["+experiment=tiny", "runtime=cpu", "train.tensorboard=false", "train.group_by_length=false"]
            fixed += [f"data.path={records}", f"data.cache_dir={folder}/cache", "data.max_train_samples=null"]
            listed = {name: [*fixed, *COMMON, *HALF, *more] for name, more in CASES.items()}
            (folder / "cases.json").write_text(json.dumps(listed))
            command = [warm_python, LAUNCHER, "--world_size", "2", PROGRAM, folder, folder / "cases.json"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-4000:]
            (folder / "done").touch()
    return folder, {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in CASES
    }


@pytest.fixture(scope="module")
def alone(tiny):
    run = tiny(*COMMON)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.parametrize("case", CASES)
def test_each_engine_gives_one_ranks_losses_and_rates(ranks, alone, case):
    """Both kinds of checkpointing, loader workers, and an adapter whose optimizer has one group for two."""
    for rank in ranks[1][case]:
        assert rank["loss"] == pytest.approx(alone.series("loss"), rel=1e-5)
        assert rank["learning_rate"] == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3], rel=1e-12)
        assert rank["eval_loss"] == pytest.approx(alone.results["eval_loss"], rel=1e-5)
        norms = [] if case.startswith("zero0") else alone.series("grad_norm")  # DeepSpeed does not tell it at stage 0
        assert rank["grad_norm"] == pytest.approx(norms, rel=1e-4)


def test_adapters_start_equal_and_batches_differ(ranks):
    found = [rank for case in ranks[1].values() for rank in case]
    assert len({rank["adapter"] for rank in found}) == 1
    for one, other in ranks[1].values():
        assert len(one["batches"]) == len(other["batches"]) == 3
        assert not set(one["batches"]) & set(other["batches"])
        assert one["batches"] == found[0]["batches"]  # the same rows in each engine


@pytest.mark.parametrize("case", ["none", "zero2", "zero3"])
def test_a_checkpoint_is_a_tenth_of_the_base_at_most(ranks, case):
    folder = ranks[0] / case / "checkpoint-2"
    base = 4 * (2 * (3 * 64 * 2048 + 2 * 64 * 64 + 2 * 32 * 64) + 2 * 259 * 64)  # matrices in float32
    assert 0 < sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 0.1 * base


def test_adapters_carry_one_mark_of_their_base_in_each_engine(ranks, alone):
    """Under ZeRO-3 too, where no rank holds the row that it is made of; and through the loading of a finished adapter."""
    folders = [ranks[0] / case / "checkpoint-2" for case in ("none", "zero2", "zero3")] + [alone.folder / "adapter"]
    marks = set()
    for folder in folders:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            marks.add(file.metadata()["base_mark"])
    assert len(marks) == 1 and len(marks.pop()) == 16


def test_one_rank_goes_on_from_a_checkpoint_of_two(ranks, alone, tiny):
    run = tiny(*COMMON, f"train.resume_from_checkpoint={ranks[0] / 'none' / 'checkpoint-2'}")
    assert run.returncode == 0, run.stderr
    assert [line["step"] for line in run.log if "loss" in line] == [3]
    assert run.series("loss") == pytest.approx(alone.series("loss")[2:], rel=1e-5)
    assert run.results["eval_loss"] == pytest.approx(alone.results["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeeds_checkpoint_of_two_ranks_is_refused_with_both_numbers_and_a_way_out(ranks, tiny, stage):
    saved = ranks[0] / stage / "checkpoint-2"
    run = tiny(*COMMON, f"deepspeed={stage}", f"train.resume_from_checkpoint={saved}")
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert run.returncode == 2 and len(errors) == 1 and "Traceback" not in run.stderr, run.stderr
    assert "was saved with world_size 2, this run has 1" in errors[0] and f"adapter.path={saved}" in errors[0]


def test_the_way_out_starts_from_the_saved_weights(ranks, alone, tiny):
    run = tiny(*COMMON, "train.max_steps=1", f"adapter.path={ranks[0] / 'zero3' / 'checkpoint-2'}")
    assert run.returncode == 0, run.stderr
    assert "warning: adapter" not in run.stderr
    (saved,) = (line["eval_loss"] for line in alone.log if "eval_loss" in line and line["step"] == 2)
    assert run.results["eval_loss_before"] == pytest.approx(saved, rel=1e-5)
