"""Plans of whole runs against the resident memory of the processes that run them (Linux)."""

import subprocess
from pathlib import Path

import pytest

from recipes.pipeline.compose import compose_here
from recipes.pipeline.memory_plan import plans

PROGRAM = str(Path(__file__).with_name("resident_run.py"))
LAUNCHER = str(Path(__file__).resolve().parents[3] / "scripts" / "gaudi_spawn.py")
MIB = 1024**2
# About 118 M parameters: what the process takes beside tensors (libraries, threads) is small against it
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 4096,
}
RUN = [
    "+experiment=tiny", "runtime=cpu", "data.batching=concatenated", "data.loss_on=all", "data.max_seq_length=256",
    "train.max_steps=2", "train.eval_strategy=no", "train.per_device_train_batch_size=2", "train.tensorboard=false",
    *(f"model.config.{name}={size}" for name, size in SHAPE.items()),
]  # fmt: skip

pytestmark = pytest.mark.slow


def resident(python: str, folder: Path, overrides: list[str], launcher: tuple[str, ...] = ()) -> list[int]:
    """Bytes above what was there before the model, of each rank."""
    command = [python, *launcher, PROGRAM, str(folder), *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(file.read_text()) for file in sorted(folder.glob("resident-*"))]


EVALUATION = ["train.do_train=false", "train.per_device_eval_batch_size=8"]
CHECKPOINTS = ["train.do_eval=false", "train.gradient_checkpointing=true", "train.per_device_train_batch_size=4"]
EAGER = [*EVALUATION, "runtime.attention=eager", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["train.do_eval=false"], id="LoRA", marks=pytest.mark.benchmark),
        pytest.param(EVALUATION, id="evaluation"),
        pytest.param(CHECKPOINTS, id="checkpoints", marks=pytest.mark.benchmark),
        pytest.param(EAGER, id="evaluation, eager attention, bf16", marks=pytest.mark.benchmark),
    ],
)
def test_a_plan_is_a_process_resident_memory(options, tmp_path, warm_python):
    planned = next(iter(plans(compose_here(RUN + options)).values())).eager
    (seen,) = resident(warm_python, tmp_path, RUN + options)
    assert planned == pytest.approx(seen, abs=max(0.05 * seen, 40 * MIB)), (planned / MIB, seen / MIB)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="as configured"),
        pytest.param(
            ["++deepspeed.zero_optimization.stage3_prefetch_bucket_size=0"],
            id="nothing ahead",
            marks=pytest.mark.benchmark,
        ),
    ],
)
def test_a_plan_is_each_ranks_resident_memory_under_zero3(options, tmp_path, warm_python):
    run = [*RUN, "train.do_eval=false", "train.per_device_train_batch_size=1", "deepspeed=zero3", *options]
    planned = next(iter(plans(compose_here([*run, "runtime.cards=2"])).values())).eager
    seen = resident(warm_python, tmp_path, run, (LAUNCHER, "--world_size", "2", "--use_deepspeed"))
    assert len(seen) == 2
    assert [planned] * 2 == pytest.approx(seen, rel=0.1), (planned / MIB, [size / MIB for size in seen])
    # 5e7 numbers, six layers, lie in the buffer of one collective while the last of them waits for its turn
