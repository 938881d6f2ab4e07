import json
import math

import pytest
import torch

from recipes.pipeline.metrics import (
    EvaluationSums,
    Throughput,
    compare_with_baseline,
    count_targets,
    perplexity,
    target_sums,
    write_json,
    write_results,
)
from recipes.pipeline.runtime import Runtime

CPU = Runtime("cpu", lazy=False)


def test_sums_divide_once_whatever_the_batches():
    # nats and targets of four texts of a real model; their token mean is hand-worked
    losses, targets = [1.81065, 4.41669, 4.52169, 2.97848], [18, 1, 10, 4]
    expected = (1.81065 * 18 + 4.41669 + 4.52169 * 10 + 2.97848 * 4) / 33
    for size in (1, 2, 3, 4):
        sums = EvaluationSums()
        for start in range(0, 4, size):
            part = slice(start, start + size)
            nats = sum(loss * count for loss, count in zip(losses[part], targets[part], strict=True))
            sums.add(torch.tensor(nats), torch.tensor(sum(targets[part])), torch.tensor(0))
        result = sums.result(CPU)
        assert result["eval_loss"] == pytest.approx(expected, abs=1e-6) == pytest.approx(2.85270, abs=1e-5)
        assert result["perplexity"] == pytest.approx(17.3345, abs=1e-3)
        assert result["eval_targets"] == 33


def test_a_batch_seen_five_times_weighs_no_less():
    once, often = EvaluationSums(), EvaluationSums()
    row = torch.tensor(7.5), torch.tensor(3), torch.tensor(1)
    once.add(*row)
    for _ in range(5):
        often.add(*row)
    assert once.result(CPU)["eval_loss"] == often.result(CPU)["eval_loss"] == 2.5


def test_target_sums_against_hand_work():
    logits = torch.zeros(1, 4, 3)
    logits[0, 0, 2] = 100.0  # sure of 2
    labels = torch.tensor([[0, 2, -100, 1]])  # targets: 2 after position 0, 1 after position 2
    nats, targets, correct = target_sums(logits, labels)
    assert targets == count_targets(labels) == 2
    assert nats.item() == pytest.approx(math.log(3), abs=1e-6)
    assert correct == 1  # a uniform row guesses 0


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["vendored", "stock"])
def test_evaluation_keeps_no_batchs_scores(implementation, warm, tmp_path):
    """Kept, those of 180 more texts would be more than a GiB."""
    rows = [{"instruction": f"Add {n} and {n % 7}.", "output": str(n + n % 7)} for n in range(200)]
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    options = [
        "+experiment=tiny", "runtime=cpu", "train.do_train=false", "train.per_device_eval_batch_size=4",
        "train.tensorboard=false", "model.config.vocab_size=8192", f"model.implementation={implementation}",
        f"data.path={tmp_path}/texts.json", f"data.eval_path={tmp_path}/texts.json", f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip
    peaks = []
    for count in (20, 200):
        given = [str(tmp_path), *options, f"data.max_eval_samples={count}"]
        done = warm("tests/recipes/pipeline/resident_run.py", *given, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        peaks.append(int((tmp_path / "resident-0").read_text()))
    assert peaks[1] - peaks[0] < 200e6, peaks


@pytest.mark.parametrize("loss", [710.0, math.nan])
def test_a_loss_without_a_finite_perplexity_warns_and_is_written_as_null(loss, tmp_path):
    with pytest.warns(UserWarning, match="no finite perplexity"):
        value = perplexity(loss)
    assert not math.isfinite(value)
    write_json(tmp_path / "x.json", {"perplexity": value, "loss": loss, "n": 1})
    assert json.loads((tmp_path / "x.json").read_text())["perplexity"] is None


@pytest.mark.parametrize("accumulation", [1, 4])
def test_throughput_leaves_warm_up_and_pauses_out(accumulation, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("recipes.pipeline.metrics.time.perf_counter", lambda: clock[0])
    meter = Throughput(CPU, warmup=2)
    meter.start()
    for step in range(10):
        clock[0] += 0.5 if step < 2 else 0.1
        meter.step(samples=8 * accumulation, tokens=torch.tensor(80 * accumulation))
        if step == 6:
            meter.pause()
            clock[0] += 0.7
            meter.start()
    meter.pause()
    result = meter.result()
    assert result["train_samples_per_second"] == pytest.approx(80 * accumulation, rel=0.001)
    assert result["train_tokens_per_second"] == pytest.approx(800 * accumulation, rel=0.001)
    assert result["train_steps_per_second"] == pytest.approx(10, rel=0.001)


def test_throughput_without_a_counted_step_says_nothing():
    meter = Throughput(CPU, warmup=3)
    meter.start()
    meter.step(1, 1)
    meter.pause()
    assert meter.result() == {}


def test_result_files_hold_their_share(tmp_path):
    memory = {"max_memory_allocated (GB)": 1.5}
    write_results(tmp_path, {"train_loss": 1.0, "eval_loss": 2.0, "perplexity": 7.4, "epoch": 1.0, **memory})
    train, evaluation, everything = (
        json.loads((tmp_path / f"{n}_results.json").read_text()) for n in ("train", "eval", "all")
    )
    assert train == {"train_loss": 1.0, "epoch": 1.0, **memory}
    assert evaluation == {"eval_loss": 2.0, "perplexity": 7.4, "epoch": 1.0, **memory}
    assert everything == train | evaluation
    assert not list(tmp_path.glob("*.part"))


def test_a_baseline_is_compared_on_both_sides():
    lines = compare_with_baseline({"eval_loss": 0.7}, {"eval_loss": 0.76, "train_loss": 1.0}, {"eval_loss": 0.01})
    assert len(lines) == 1 and "OUTSIDE" in lines[0] and "-0.06" in lines[0]
    assert "within" in compare_with_baseline({"eval_loss": 0.7601}, {"eval_loss": 0.76}, {"eval_loss": 0.01})[0]
