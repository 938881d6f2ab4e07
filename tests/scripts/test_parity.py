"""parity.py: what it calls the same, what it refuses, and how it says so. Injected faults: test_parity_faults.py."""

import copy
import hashlib
import json
import math
import shlex
import statistics
from xml.etree import ElementTree

import pytest
import yaml

from recipes.pipeline.config import InputError
from scripts import results
from scripts.comparison import Verdict, compare
from scripts.parity import main
from scripts.results import REPOSITORY, read
from scripts.statistics_of_arms import paired

METRICS = {
    "eval_loss": 1.25, "perplexity": math.exp(1.25), "eval_accuracy": 0.7, "eval_samples": 43, "eval_targets": 490,
    "train_loss": 1.5, "global_step": 3, "epoch": 0.5, "max_memory_allocated (GB)": 2.0, "train_runtime": 10.0,
    "train_samples_per_second": 3.0,
}  # fmt: skip
STEPS = [{"step": n, "loss": 2.0 - 0.1 * n, "grad_norm": 1.0 + n, "learning_rate": 1e-3} for n in (1, 2, 3)]
CONFIG = {"model": {"name_or_path": "org/Llama-X", "dtype": "float32"}, "runtime": {"mark_step": None}, "seed": 42}
DATA = {
    "fingerprint": {
        "files": "aaaa", "eval_files": "aaaa", "held_out": "bbbb", "split": "10 %, random", "template": "alpaca",
        "loss_on": "response", "batching": "padded", "max_seq_length": 256, "too_long": "truncate", "tokenizer": "cccc",
    },
    "counts": {"train": {"targets": 5052}, "eval": {"targets": 490}},
}  # fmt: skip
VERSIONS = {
    "device": "cpu",
    "world_size": 1,
    "torch": "2.13.0",
    "cpu": "AVX2",
    "platform": "Linux-6.1-x86_64-with-glibc2.36",
}


@pytest.fixture
def run(tmp_path):
    """run("name", metrics={...}, fingerprint={...}, ...) -> a run folder with these changes."""

    def build(name, metrics=(), steps=None, fingerprint=(), counts=None, config=None, versions=()):
        folder = tmp_path / name
        folder.mkdir()
        data = copy.deepcopy(DATA)
        data["fingerprint"] |= dict(fingerprint)
        data["counts"] |= counts or {}
        written = {k: v for k, v in {**METRICS, **dict(metrics)}.items() if v is not ...}
        (folder / "all_results.json").write_text(json.dumps(written))
        (folder / "log.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps or STEPS))
        (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **(config or {})}))
        (folder / "data.json").write_text(json.dumps(data))
        (folder / "versions.json").write_text(json.dumps({**VERSIONS, **dict(versions)}))
        return str(folder)

    return build


def loss(value):
    return {"eval_loss": value, "perplexity": math.exp(value)}


# The measured figures


def test_the_measured_pair_is_the_same_both_ways(capsys):
    for pair in (("gaudi2_70b_after", "gaudi2_70b_before"), ("gaudi2_70b_before", "gaudi2_70b_after")):
        assert main([pair[0], "--baseline", pair[1]]) == 0
        assert capsys.readouterr().out.startswith("SAME")
    rows = {row.metric: row for row in compare(read("gaudi2_70b_after"), read("gaudi2_70b_before")).rows}
    assert rows["eval_loss"].difference == pytest.approx(5.7e-6, rel=0.01)
    assert rows["eval_accuracy"].difference == pytest.approx(7.8e-5, rel=0.01)
    assert rows["train_loss"].difference == 0


@pytest.mark.parametrize("value", [0.70, 0.7655])  # better and worse: both differ
def test_a_loss_off_on_either_side_differs(value, tmp_path, capsys):
    path = tmp_path / "all_results.json"
    path.write_text(json.dumps({**read("gaudi2_70b_after").metrics, **loss(value)}))
    assert main([str(path), "--baseline", "gaudi2_70b_after"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("DIFFERS") and "outside: eval_loss, perplexity" in out.splitlines()[0]


# Same and different


def test_equal_runs_are_the_same_in_any_order_of_keys(run, tmp_path, capsys):
    one, other = run("one"), run("other", {"train_runtime": 99.0, "max_memory_allocated (GB)": 1.0})
    path = tmp_path / "other" / "all_results.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert main([other, "--baseline", one]) == 0
    out = capsys.readouterr().out
    assert "reported" in out and "OUTSIDE" not in out


@pytest.mark.parametrize("name", ["eval_accuracy", "train_loss", "eval_samples", "eval_targets"])
@pytest.mark.parametrize("sign", [1, -1])
def test_each_figure_decides_both_ways(name, sign, run):
    changed = run(
        "changed", {name: METRICS[name] + sign * (1 if name.startswith("eval_s") or "targets" in name else 0.01)}
    )
    comparison = compare(read(changed), read(run("base")))
    assert comparison.verdict is Verdict.DIFFERS
    assert [row.metric for row in comparison.rows if not row.ok] == [name]


def test_steps_are_compared_one_by_one(run):
    steps = [dict(step) for step in STEPS]
    steps[1]["loss"] += 1e-3
    comparison = compare(read(run("changed", steps=steps)), read(run("base")))
    row = next(row for row in comparison.rows if row.metric == "step_loss")
    assert not row.ok and row.at == "step 2 of 3, first outside at step 2"
    assert row.difference == pytest.approx(1e-3)


def test_a_log_alone_is_a_result(run, capsys):
    assert (
        main(
            [
                run("one") + "/log.jsonl",
                "--baseline",
                run("two") + "/log.jsonl",
                "--allow",
                "eval_loss",
                "--allow",
                "perplexity",
            ]
        )
        == 0
    )
    assert main([run("three") + "/log.jsonl", "--baseline", run("four") + "/log.jsonl"]) == 2
    assert "no eval_loss" in capsys.readouterr().out


def test_memory_and_speed_decide_only_when_asked(run, capsys):
    base, heavier = run("base"), run("heavier", {"max_memory_allocated (GB)": 2.2, "train_samples_per_second": 2.0})
    assert main([heavier, "--baseline", base]) == 0
    assert main([heavier, "--baseline", base, "--require", "memory"]) == 1
    assert "outside: max_memory_allocated (GB)" in capsys.readouterr().out
    assert main([heavier, "--baseline", base, "--require", "speed"]) == 1
    within = run("within", {"max_memory_allocated (GB)": 2.05})
    assert main([within, "--baseline", base, "--require", "memory"]) == 0


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "same"),
        ({"versions": {"world_size": 2}}, "ranks"),
        ({"versions": {"cpu": "AVX512"}}, "kernel"),
        ({"config": {"runtime": {"mark_step": True}}}, "kernel"),
        ({"config": {"model": {"name_or_path": "org/Llama-X", "dtype": "bfloat16"}}}, "dtype"),
    ],
)
def test_what_differs_between_the_runs_chooses_the_tolerance(changes, kind, run):
    comparison = compare(read(run("changed", **changes)), read(run("base")))
    assert comparison.kind == kind and comparison.verdict is Verdict.SAME
    limit = next(row.tolerance for row in comparison.rows if row.metric == "eval_loss")
    assert run("just_in", loss(1.25 + 0.9 * limit), **changes) and run("just_out", loss(1.25 + 1.1 * limit), **changes)
    base = read(run("again"))
    folder = base.folder.parent
    assert compare(read(str(folder / "just_in")), base).verdict is Verdict.SAME
    assert compare(read(str(folder / "just_out")), base).verdict is Verdict.DIFFERS


# What cannot be compared

DIFFERENCES = {
    "data.files": {"fingerprint": {"files": "zzzz"}},
    "data.held_out": {"fingerprint": {"held_out": "zzzz"}},
    "data.split": {"fingerprint": {"split": "4 %, first"}},
    "data.template": {"fingerprint": {"template": "llama3_chat"}},
    "data.loss_on": {"fingerprint": {"loss_on": "all"}},
    "data.max_seq_length": {"fingerprint": {"max_seq_length": 512}},
    "data.batching": {"fingerprint": {"batching": "packed"}},
    "data.tokenizer": {"fingerprint": {"tokenizer": "zzzz"}},
    "train.targets": {"counts": {"train": {"targets": 5051}}},
    "eval.targets": {"counts": {"eval": {"targets": 489}}},
    "model": {"config": {"model": {"name_or_path": "org/Llama-Y", "dtype": "float32"}}},
    "global_step": {"metrics": {"global_step": 4}},
    "epoch": {"metrics": {"epoch": 1.0}},
}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_other_data_model_or_length_is_refused_by_name(key, run, capsys):
    other, base = run("other", **DIFFERENCES[key]), run("base")
    assert main([other, "--baseline", base]) == 2
    out = capsys.readouterr().out
    assert out.startswith("NOT COMPARABLE") and f"not comparable: {key}: " in out
    assert out.count("not comparable:") == 1
    assert main([other, "--baseline", base, "--allow", key]) == 0  # accepted by name, and said
    assert f"allowed to differ: {key}: " in capsys.readouterr().out


def test_every_difference_is_named(run, capsys):
    other = run("other", fingerprint={"files": "zzzz", "template": "llama3_chat"}, metrics={"epoch": 2.0})
    assert main([other, "--baseline", run("base"), "--allow", "epoch"]) == 2
    out = capsys.readouterr().out
    assert "data.files: zzzz against aaaa" in out and "data.template: llama3_chat against alpaca" in out
    assert "allowed to differ: epoch: 2.0 against 0.5" in out


def test_a_hub_id_and_a_local_copy_are_one_model(run):
    local = run("local", config={"model": {"name_or_path": "/mnt/weights/llama-x/", "dtype": "float32"}})
    assert compare(read(local), read(run("base"))).verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"eval_loss": ...}, "no eval_loss"),
        ({"perplexity": ...}, "no perplexity"),
        ({"eval_loss": None}, "eval_loss is nan"),
        ({"train_loss": math.inf}, "train_loss is inf"),
        ({"perplexity": 3.4}, "perplexity 3.4 is not exp(1.25) = 3.49034"),
    ],
)
def test_missing_or_impossible_figures_are_refused(metrics, said, run, capsys):
    assert main([run("bad", metrics), "--baseline", run("base")]) == 2
    assert said in capsys.readouterr().out
    assert main([str(read(run("good")).folder), "--baseline", str(read(run("bad2", metrics)).folder)]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--baseline", "gaudi2_70b_after"], "nowhere: neither a run folder"),
        (["gaudi2_70b_before", "--baseline", "gaudi2_70b_aftr"], "near: gaudi2_70b_after"),
        (["gaudi2_70b_before", "--baseline", "gaudi2_70b_after", "--allow", "eval_los"], "near eval_loss"),
        (["gaudi2_70b_before"], "--baseline is needed"),
        (["--baseline", "gaudi2_70b_after"], "one RUN is needed, none was given"),
        (["gaudi2_70b_before", "gaudi2_70b_after"], "one RUN is needed, 2 were given"),
        (["gaudi2_70b_before", "--bseline", "x"], "unrecognized arguments: --bseline"),
        (["gaudi2_70b_before", "--baseline", "x", "--require", "taste"], "invalid choice: 'taste'"),
        (["--ab", "runtime.mark_step=true"], "takes KEY=A,B"),
        (["--stock", "--arms", "dtype"], "give one of them"),
        (["--arms", "dtype", "--seeds", "2"], "--seeds 2: takes 3 or more"),
        (["--record", "gaudi2_70b_after", "gaudi2_70b_before"], "exists"),
        (["--record", "../x", "gaudi2_70b_before"], "letters, digits and _"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as status:
        main(arguments)
    err = capsys.readouterr().err
    assert status.value.code == 2 and said in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("all_results.json", '{"eval_loss": 1.2', "all_results.json: cannot be read as JSON (half written?)"),
        ("all_results.json", "[1, 2]", "a JSON object of results is expected, found a list"),
        ("all_results.json", '{"note": "x"}', "no figures in it"),
        ("all_results.json", None, "no all_results.json (the run has not finished, or was stopped)"),
        ("log.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "log.jsonl line 2: not a record of a step"),
        ("data.json", "{", "data.json: cannot be read as JSON"),
    ],
)
def test_a_damaged_run_is_one_line_and_exit_2(name, content, said, run, capsys):
    folder = read(run("damaged")).folder
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(SystemExit) as status:
        main([str(folder), "--baseline", run("base")])
    err = capsys.readouterr().err
    assert status.value.code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_an_empty_folder_is_no_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        main([str(tmp_path), "--baseline", "gaudi2_70b_after"])
    assert status.value.code == 2 and "no run has written there" in capsys.readouterr().err


# Files


def test_json_and_junit_say_what_the_table_says(run, tmp_path):
    arguments = [run("changed", loss(1.3)), "--baseline", run("base")]
    assert main([*arguments, "--json", str(tmp_path / "p.json"), "--junit", str(tmp_path / "p.xml")]) == 1
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["verdict"] == "differs" and content["exit_status"] == 1
    wrong = {row["metric"]: row for row in content["metrics"] if not row["same"]}
    assert set(wrong) == {"eval_loss", "perplexity"} and wrong["eval_loss"]["difference"] == pytest.approx(0.05)
    suite = ElementTree.parse(tmp_path / "p.xml").getroot()
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["eval_loss", "perplexity"] and suite.get("failures") == "2"
    assert int(suite.get("tests")) == len(suite) == len(content["metrics"])


def test_junit_of_what_cannot_be_compared_is_an_error(run, tmp_path):
    arguments = [run("other", fingerprint={"files": "zzzz"}), "--baseline", run("base")]
    assert main([*arguments, "--junit", str(tmp_path / "p.xml")]) == 2
    suite = ElementTree.parse(tmp_path / "p.xml").getroot()
    assert suite.get("errors") == "1" and suite.find("testcase/error").get("message") == "data.files: zzzz against aaaa"


@pytest.fixture
def own_baselines(tmp_path, monkeypatch):
    folder = tmp_path / "baseline"
    folder.mkdir()
    monkeypatch.setattr(results, "BASELINES", folder)
    return folder


def test_a_recorded_baseline_is_compared_like_the_run(run, own_baselines, capsys):
    assert main(["--record", "mine", run("one")]) == 0
    assert main([run("two"), "--baseline", "mine"]) == 0
    assert main([run("worse", loss(1.2501)), "--baseline", "mine"]) == 1
    assert main([run("other", fingerprint={"files": "zzzz"}), "--baseline", "mine"]) == 2
    steps = [{**STEPS[0], "loss": 1.0}, *STEPS[1:]]
    capsys.readouterr()
    assert main([run("steps", steps=steps), "--baseline", "mine"]) == 1
    assert "first outside at step 1" in capsys.readouterr().out


def test_a_baseline_is_not_written_over(run, own_baselines):
    main(["--record", "mine", run("one")])
    kept = (own_baselines / "mine.yaml").read_text()
    with pytest.raises(SystemExit) as status:
        main(["--record", "mine", run("two", loss(1.5))])
    assert status.value.code == 2 and (own_baselines / "mine.yaml").read_text() == kept
    assert main(["--record", "mine", run("three", loss(1.5)), "--overwrite"]) == 0
    assert read("mine").metrics["eval_loss"] == 1.5


def test_a_run_with_nan_is_no_baseline(run, own_baselines):
    with pytest.raises(InputError, match="no finite eval_loss"):
        results.record_baseline("mine", read(run("bad", {"eval_loss": None})))
    assert not list(own_baselines.iterdir())


@pytest.mark.slow
def test_this_commit_is_the_recorded_smoke_run(tmp_path, run_recipe, capsys, one_for_all):
    """SmolLM2 trained and evaluated by this commit, against the figures in conf/baseline/smoke_short.yaml, step by step."""
    words = shlex.split(read("smoke_short").command)
    assert words[:2] == ["python", "recipes/lora.py"] and "+experiment=smoke" in words
    done = run_recipe(
        *words[2:],
        f"hydra.run.dir={tmp_path / 'run'}",
        "samples=0",
        "memory_curve=false",
        f"model.cache_dir={one_for_all}/models",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert main([str(tmp_path / "run"), "--baseline", "smoke_short"]) == 0
    out = capsys.readouterr().out
    assert "of 4)" in next(line for line in out.splitlines() if "step_loss" in line)


@pytest.mark.parametrize("name", ["tiny", "smoke", "smoke_short"])
def test_recorded_baselines_are_of_the_repositorys_own_records(name):
    baseline = read(name)
    content = (REPOSITORY / "conf" / "data" / "smoke.jsonl").read_bytes()
    assert baseline.facts["data.files"] == hashlib.sha256(len(content).to_bytes(8, "little") + content).hexdigest()
    assert baseline.steps and baseline.command.startswith("python recipes/lora.py +experiment=")
    assert math.exp(baseline.metrics["eval_loss"]) == pytest.approx(baseline.metrics["perplexity"], rel=1e-9)


# Statistics


def test_the_interval_is_students():
    """By hand: gaps 1, 2, 3: mean 2, standard error 1 / sqrt 3, t(2) = 4.303."""
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.high == pytest.approx(2 + 4.303 / math.sqrt(3), rel=1e-4)
    assert not found.stands_out  # 2.48 to either side
    assert found.spread == statistics.stdev([1.0, 2.0, 3.0])
    assert paired([2.0, 3.0, 4.01], [1.0, 2.0, 3.0]).stands_out


def test_quantiles_are_scipys():
    from scipy import stats

    from scripts.statistics_of_arms import T_95

    for freedom, quantile in T_95.items():
        assert quantile == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def test_one_pair_gives_no_verdict():
    with pytest.raises(ValueError, match="3 or more pairs"):
        paired([1.0, 2.0], [1.0, 2.0])
