"""A/B runs: arms by options, what the report holds, what stock transformers gives, what a seed's noise hides."""

import json
import math
import re
import subprocess

import pytest

from recipes.pipeline.compose import compose_here
from recipes.pipeline.config import InputError
from scripts.arms import Arm, _arms, _outcome, _split, _split_rows, describe
from scripts.comparison import Verdict
from scripts.parity import main, parse
from scripts.ready_arms import READY
from scripts.results import REPOSITORY, Result

TINY = ["+experiment=tiny", "runtime=cpu", "train.max_steps=3", "train.eval_on_start=false", "train.tensorboard=false"]


@pytest.fixture
def parity(tmp_path, warm_python):
    """parity("--ab", ...) -> (exit status, what is printed, folder of the report), the recipe run for real."""

    def run(*arguments):
        folder = tmp_path / "report"
        command = [warm_python, str(REPOSITORY / "scripts" / "parity.py"), *arguments, "--output", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return done.returncode, done.stdout, folder

    return run


@pytest.mark.parametrize("name", READY)
def test_ready_arms_are_configurations(name):
    chosen = []
    for arm in READY[name]:
        cfg = compose_here(["+experiment=tiny", *(item for item in arm if not item.startswith("ranks="))])
        chosen.append((str(cfg), [item for item in arm if item.startswith("ranks=")]))
    assert len({str(one) for one in chosen}) == len(READY[name]) >= 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--baseline", "smoke"], "--baseline belongs to one finished RUN"),
        (["--junit", "x.xml"], "--junit belongs to one finished RUN"),
        (["--record", "mine"], "--record belongs to one finished RUN"),
        (["--repeats", "0"], "--repeats 0"),
    ],
)
def test_options_that_arms_do_not_take(options, said, capsys):
    with pytest.raises(SystemExit) as status:
        main(["--arms", "kernels", "+experiment=tiny", *options])
    assert status.value.code == 2 and said in capsys.readouterr().err


def test_every_repeat_is_compared():
    """A difference in the second repeat only is a difference."""
    outcome = _outcome(arm_of("arm", [1.0, 1.01]), arm_of("first", [1.0, 1.0]), parse(["--ab", "seed=1,2"]))
    assert outcome.verdict is Verdict.DIFFERS


def test_several_ab_options_are_all_combinations():
    arms = _arms(parse(["--ab", "seed=1,2", "--ab", "runtime.mark_step=true,false", "+experiment=tiny"]))
    assert arms == [[f"seed={s}", f"runtime.mark_step={m}"] for s in (1, 2) for m in ("true", "false")]


def test_values_are_split_outside_brackets():
    assert _split("[q_proj,v_proj],[all-linear],{a:1,b:2}") == ["[q_proj,v_proj]", "[all-linear]", "{a:1,b:2}"]


def test_ranks_share_out_the_rows_of_a_step():
    assert (
        _split_rows(["+experiment=tiny", "train.per_device_train_batch_size=6"], 2)[-1]
        == "train.per_device_train_batch_size=3"
    )
    with pytest.raises(InputError, match=r"train\.per_device_train_batch_size=5 cannot be divided"):
        _split_rows(["+experiment=tiny", "train.per_device_train_batch_size=5"], 2)


@pytest.mark.slow
def test_arms_that_are_the_same_and_their_report(parity):
    status, out, folder = parity("--ab", "runtime.in_place_residual=null,false", *TINY, "--json", "out.json")
    assert status == 0 and out.startswith("SAME: 2 arms, 1 run(s) each; first: runtime.in_place_residual=null")
    assert "runtime.in_place_residual: None -> False" in out
    page = (folder / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # self-contained
    assert page.count("data:image/png;base64,") == 3  # curves, divergence, time and memory
    for part in (
        "SAME",
        "Divergence, tensor by tensor",
        "runtime.in_place_residual: None -&gt; False",
        "Time and memory",
    ):
        assert part in page
    assert (folder / "parity.png").stat().st_size > 10_000
    (arm,) = json.loads((folder.parent / "out.json").read_text())["arms"]
    assert arm["verdict"] == "same" and arm["first_divergence"] is None


@pytest.mark.slow
def test_an_arm_that_differs_is_named_with_its_place(parity):
    status, out, _ = parity("--ab", "adapter.lora_alpha=16,32", *TINY)
    assert status == 1 and out.startswith("DIFFERS")
    # B is zero in the first step, so its outputs are the same: the scale is seen in the last layer's gradient first
    assert "first divergence: step 1, gradient, model.layers.1.mlp.down_proj.lora_B.default.weight" in out


@pytest.mark.slow
def test_an_arm_that_fails_is_said_with_its_last_line(parity):
    status, out, _ = parity("--ab", "train.per_device_train_batch_size=8,0", *TINY)
    assert status == 1
    assert "exit status 2: error: train.per_device_train_batch_size" in out


@pytest.mark.slow
def test_stock_is_transformers_own_model_and_gives_our_curve(parity):
    status, out, folder = parity("--stock", *TINY)
    assert status == 0, out
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("    ")}
    assert float(rows["step_loss"].split()[3]) < 1e-4
    versions = [(folder / f"arm{n}-run0" / "config.yaml").read_text() for n in (0, 1)]
    assert ["implementation: stock" in text for text in versions] == [True, False]


def test_stock_has_no_module_of_ours():
    from recipes.pipeline.model import build_model, load_tokenizer
    from recipes.pipeline.runtime import Runtime

    cfg = compose_here(["+experiment=tiny", "runtime=cpu", "model.implementation=stock"])
    model = build_model(cfg, load_tokenizer(cfg.model), Runtime(kind="cpu", lazy=False))
    homes = {type(module).__module__.split(".")[0] for module in model.modules()}
    assert homes == {"transformers", "peft", "torch"}


def arm_of(name, losses):
    arm = Arm(name, [])
    for loss in losses:
        metrics = {"eval_loss": loss, "perplexity": math.exp(loss)}
        arm.runs.append(Result(name, metrics))
    return arm


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((0.02, -0.01, 0.005), Verdict.SAME),  # to both sides: noise, though each pair alone is outside its tolerance
        ((0.020, 0.021, 0.019), Verdict.DIFFERS),  # small beside the spread over seeds, but the same for each seed
    ],
)
def test_seeds_tell_noise_from_a_shift(gaps, verdict):
    losses = [1.0, 1.2, 1.4]
    first, arm = arm_of("first", losses), arm_of("arm", [a + b for a, b in zip(losses, gaps, strict=True)])
    options = parse(["--ab", "seed=1,2", "--seeds", "3"])
    outcome = _outcome(arm, first, options)
    assert outcome.verdict is verdict
    text = describe([first, arm], [outcome], outcome.verdict)
    assert "95 % interval" in text and "3 seeds" in text and "seed-to-seed spread 2.00e-01" in text
    assert ("does not stand out of the noise" in text) == (verdict is Verdict.SAME)
