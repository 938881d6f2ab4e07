"""plan.py: the table is the README's, the terms are the run's, bad input is one line. Plans themselves: tests/modeling/test_plan.py."""

import json
import re
from pathlib import Path

import pytest

from recipes.pipeline.config import InputError
from recipes.pipeline.memory_plan import capacity, main_plan
from scripts.measured_memory import figures, rows, table
from scripts.plan import main

REPOSITORY = Path(__file__).resolve().parents[2]
# What tensors alone do not explain; the others must come out of the code within what was set before
MISSED = ["inference, no flash attention, before", "inference, no flash attention: before less after"]


@pytest.mark.slow
def test_the_table_of_measured_figures_is_the_readmes_with_its_misses():
    found = rows()
    assert [row.name for row in found if row.reproduced is False] == MISSED
    printed = table(found).splitlines()
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    start = readme.index(printed[0])
    assert readme[start : start + len(found) + 2] == printed[: len(found) + 2]


def test_the_measured_figures_are_the_published_ones():
    published = json.loads((REPOSITORY / "tests" / "facts.json").read_text())["training_llama2_70b_lora_8_gaudi2"]
    known = figures()
    for state in ("before", "after"):
        assert known["training"]["peak"][state] == published[state]["max_memory_allocated (GB)"]
        assert known["training"]["end"][state] == published[state]["memory_allocated (GB)"]
    assert known["inference"]["without_flash_attention"] == {"before": 86, "after": 66}
    assert known["inference"]["with_flash_attention"] == {"before": 70, "after": 59}


@pytest.fixture
def printed(capsys):
    def run(*arguments):
        main(list(arguments))
        return capsys.readouterr().out

    return run


def test_the_report_names_terms_tensors_and_cards(printed, tmp_path):
    out = printed("+experiment=tiny", "runtime=cpu", "--quick", "--html", str(tmp_path / "plan.html"))
    for part in ("training: 4 rows of", "weights", "kept for backward", "tensors at the peak", "Gaudi2", "assumed"):
        assert part in out, part
    page = (tmp_path / "plan.html").read_text()
    assert "data:image" in page and not re.findall(r'(?:src|href)="(?!data:)', page)  # self-contained


def test_json_adds_up(printed):
    plans = json.loads(printed("+experiment=tiny", "runtime=cpu", "--quick", "--json"))["plans"]
    assert set(plans) == {"training", "evaluation"}
    for made in plans.values():
        assert made["eager"] == sum(made["static"].values()) + sum(made["peak"].values())
        assert made["low"] <= made["nominal"] <= made["high"]


def test_a_path_that_says_generate_is_no_generation(printed):
    out = printed("+experiment=tiny", "runtime=cpu", "data.path=/nowhere/generate.jsonl", "--quick")
    assert out.startswith("training: ")


def test_the_largest_batch_of_an_evaluation(printed):
    shape = ("model.config.hidden_size=4096", "model.config.intermediate_size=16384", "data.max_seq_length=1024")
    arguments = (
        "+experiment=tiny",
        "runtime=cpu",
        "runtime.loss_chunk=100000",
        "train.do_train=false",
        *shape,
        "--json",
    )
    found = json.loads(printed(*arguments, "--card", "H100"))
    rows, bound = found["largest"]["with"]["rows"]

    def high(batch):
        given = f"train.per_device_eval_batch_size={batch}"
        return json.loads(printed(*arguments, given, "--quick"))["plans"]["evaluation"]["high"]

    assert bound == "" and high(rows) <= capacity("H100") < high(rows + 1)


def test_two_configurations_are_compared_in_the_same_step(printed):
    out = printed("+experiment=tiny", "runtime=cpu", "--compare", "train.per_device_eval_batch_size=64")
    assert out.startswith("training, the step that needs most")
    assert all(float(line.split()[-1]) == 0 for line in out.splitlines()[2:])


def test_two_configurations_term_by_term(printed):
    out = printed("+experiment=tiny", "runtime=cpu", "--compare", "adapter.r=16")
    line = next(line for line in out.splitlines() if line.startswith("optimizer"))
    assert "second: adapter.r=16" in out and len(line.split()) == 4


@pytest.mark.slow
def test_options_and_the_largest_batch(printed):
    """The batch that is said to fit fits, and one row more does not."""
    shape = [f"model.config.{pair}" for pair in ("hidden_size=4096", "intermediate_size=16384", "vocab_size=32000")]
    arguments = ("+experiment=tiny", "runtime=cpu", *shape, "train.do_eval=false", "--json")
    found = json.loads(printed(*arguments, "--card", "H100"))
    assert found["options"]["train.per_device_train_batch_size=2"] < 0 < found["options"]["adapter.r=8"]
    assert "without" not in found["largest"]  # in training op by op there is neither break nor in-place add
    rows, bound = found["largest"]["with"]["rows"]
    assert bound == "" and rows > 1

    def high(batch):
        given = f"train.per_device_train_batch_size={batch}"
        plans = json.loads(printed(*arguments, given, "--quick"))["plans"]
        return max(plan["high"] for plan in plans.values())

    assert high(rows) <= capacity("H100") < high(rows + 1)


@pytest.mark.slow
def test_the_largest_batch_of_70b_with_and_without_the_measures(printed):
    """Where the in-place add saves two (rows, length, hidden) tensors of a batch, more rows fit."""
    found = json.loads(printed("+experiment=70b_generate", "--json"))
    rows = [found["largest"][which]["rows"][0] for which in ("with", "without")]
    assert rows[0] > rows[1] > 172
    saved = 2 * 172 * 2048 * 8192 * 2
    assert found["options"]["runtime.in_place_residual=false"] == pytest.approx(saved, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+experiment=tiny", "train.per_device_train_batch_size=0"], "train.per_device_train_batch_size=0: takes 1 or more"),
        (["+experiment=smoke", "data.max_seq_length=9000"], "data.max_seq_length is 9000, above the model's max_position_embeddings 8192"),
        (["+experiment=70b_generate", "generate.tensor_parallel=3"], "generate.tensor_parallel=3"),
        (["+experiment=tiny", "--card", "Gaudi9"], "card Gaudi9: not known; there is Gaudi2"),
        (["+experiment=tiny", "--html", "nowhere/plan.html"], "no folder nowhere"),
        (["+experiment=tiny", "--kard", "x"], "unrecognized arguments: --kard"),
        (["+experiment=tiny", "--html", "/tmp"], "--html /tmp: a folder"),
        (["+experiment=tiny", "--json", "--html", "plan.html"], "--json or --html, one at a time"),
        (["+experiment=tiny", "--compare", "adapter.r=2", "--json"], "leave --json out"),
        (["+experiment=tiny", "model.config.hidden_size=0"], "no plan of this model (model.config"),
        (["+experiment=tiny", "model.config.vocab_size=abc"], "no plan of this model (model.config"),
        (["+experiment=70b", "runtime.environment.PT_HPU_MAX_COMPOUND_OP_SIZE=abc"], "PT_HPU_MAX_COMPOUND_OP_SIZE=abc: takes a whole"),
        (["+experiment=70b", "++deepspeed.zero_optimization.stage3_prefetch_bucket_size=lots"], "bucket_size=lots: takes a number"),
        (["+experiment=70b", "runtime.cards=-4"], "runtime.cards=-4: takes 1 or more"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as status:
        main([*arguments, *(["--quick"] if "--card" not in arguments else [])])
    err = capsys.readouterr().err
    assert status.value.code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_what_is_assumed_can_be_set_and_is_said(printed):
    out = printed("+experiment=70b_generate", "--quick", "runtime.plan_lag=3", "runtime.plan_delay=5")
    assert "softmax: inside attention's kernel" in out
    assert "high: 5 ops after the last use" in out and "3 graphs later at the most" in out
    out = printed("+experiment=70b_generate", "--quick", "runtime.attention=eager", "runtime.attn_softmax_bf16=true")
    assert "softmax: eager attention's, in bfloat16" in out
    assert "softmax: eager attention's, in float32" in printed("+experiment=tiny", "--quick", "runtime.attention=eager")


def test_memory_that_comes_back_later_raises_the_high_figure_only(compose):
    """The more graphs a device may be behind, and the more ops until memory is used again, the more can be alive."""
    run = ["+experiment=tiny", "runtime=gaudi_lazy", "train.do_train=false"]
    at_once, usual, late = (
        main_plan(compose(*run, f"runtime.plan_lag={lag}", f"runtime.plan_delay={delay}"))
        for lag, delay in ((0, 0), (8, 2), (16, 4))
    )
    assert at_once.high == at_once.nominal < usual.high < late.high
    assert len({(made.low, made.nominal) for made in (at_once, usual, late)}) == 1
    with pytest.raises(InputError, match=r"runtime\.plan_lag=-1: takes 0 or more"):
        compose(*run, "runtime.plan_lag=-1")
