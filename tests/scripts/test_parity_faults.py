"""parity.py finds what a plausible change could break, and names the right place; and is quiet where nothing has changed."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.comparison import Verdict, compare
from scripts.divergence import first_divergence
from scripts.parity import main
from scripts.results import read

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("faulty_runs.py")
LAUNCHER = [str(REPOSITORY / "scripts" / "gaudi_spawn.py"), "--world_size", "2"]
# fault -> (sound run it is held against, how the place is named)
PLACES = {
    "residual_dropped": ("sound", "step 1, forward, model.layers.1"),
    "heads_permuted": ("sound", "step 1, forward, model.layers.1.self_attn.o_proj"),
    "rotary_in_bf16": ("sound", "step 1, forward, model.rotary_emb"),
    "labels_shifted_twice": ("sound", "step 1, forward, lm_head"),
    "padding_scored": ("sound", "step 1, forward, lm_head"),
    "loss_on_the_prompt": ("sound", "step 1, forward, lm_head"),
    "lora_alpha_ignored": ("sound", "step 1, gradient, model.layers.1.mlp.down_proj.lora_B.default.weight"),
    "norm_epsilon": ("sound", "step 1, forward, model.layers.1.post_attention_layernorm"),
    "in_place_in_training": ("checkpointed", "step 1, gradient, model.layers.1"),
    "mean_of_batch_means": ("sound", "evaluation (eval_loss, perplexity, eval_loss_before); training is the same"),
    "dropout_in_evaluation": ("dropout", "step 0, evaluation: it draws random numbers"),
    "adapter_not_loaded": ("evaluated", "evaluation (eval_loss, perplexity"),
}


def start(python: str, folder: Path, names: list[str], launcher: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [python, *launcher, str(PROGRAM), str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, warm_python):
    folder = tmp_path_factory.mktemp("faults")
    names = ["sound", "dropout", "checkpointed", "evaluated", "other_batch", *PLACES]
    start(warm_python, folder, names, [])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "sound", "place"), [(fault, *wanted) for fault, wanted in PLACES.items()])
def test_a_fault_is_exit_1_and_its_place_is_named(runs, fault, sound, place, capsys):
    assert main([str(runs / fault), "--baseline", str(runs / sound)]) == 1
    assert capsys.readouterr().out.startswith("DIFFERS")
    comparison = compare(read(str(runs / fault)), read(str(runs / sound)))
    assert first_divergence(comparison, 1e-6).where.startswith(place)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_missing_gradient_of_one_rank_is_found(tmp_path, warm_python):
    for name in ("two_ranks", "one_ranks_gradient_missing"):
        start(warm_python, tmp_path, [name], LAUNCHER)
    comparison = compare(*(read(str(tmp_path / name)) for name in ("one_ranks_gradient_missing", "two_ranks")))
    assert comparison.verdict is Verdict.DIFFERS
    # Rank 0's own tensors are the same up to the step's update: what differs first is the step itself
    assert first_divergence(comparison, 1e-6).where.startswith("step 1, update")
    assert not next(row for row in comparison.rows if row.metric == "grad_norm").ok


@pytest.mark.slow
def test_another_evaluation_batch_is_no_difference(runs):
    assert main([str(runs / "other_batch"), "--baseline", str(runs / "sound")]) == 0


@pytest.mark.slow
def test_another_folder_and_order_are_no_difference(runs, tmp_path):
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("config.yaml", "data.json", "versions.json", "log.jsonl"):
        (copy / name).write_bytes((runs / "sound" / name).read_bytes())
    results = json.loads((runs / "sound" / "all_results.json").read_text())
    results |= {"train_runtime": 9 * results["train_runtime"], "max_memory_allocated (GB)": 7.0}  # a busy machine
    (copy / "all_results.json").write_text(json.dumps(dict(reversed(results.items()))))
    comparison = compare(read(str(copy)), read(str(runs / "sound")))
    assert comparison.verdict is Verdict.SAME
    assert compare(read(str(copy)), read(str(runs / "sound")), require=("memory",)).verdict is Verdict.DIFFERS


@pytest.mark.slow
def test_a_run_is_the_same_as_itself_in_every_tensor(runs):
    comparison = compare(read(str(runs / "checkpointed")), read(str(runs / "sound")))
    assert comparison.kind == "kernel" and comparison.verdict is Verdict.SAME
    assert first_divergence(comparison, 1e-5) is None
