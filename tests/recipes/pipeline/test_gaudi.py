"""optimum-habana's own GaudiTrainer, under the double of the bridge, against transformers' Trainer on the CPU.

Each process (mode of the bridge) trains all its configurations; variants.py is the program. What is compared is the whole
way from the command line to the saved adapter. What a CPU cannot show is listed in tests/doubles/habana_double.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[3]
DOUBLES = REPOSITORY / "tests" / "doubles"
pytestmark = [pytest.mark.slow]

# With a vanishing epsilon Adam's two usual places for it agree (the fused optimizer has the other one)
COMMON = [
    "+experiment=tiny",
    "train.max_steps=3",
    "train.eval_strategy=no",
    "train.eval_on_start=false",
    "train.adam_epsilon=1e-12",
    "data.show_samples=0",
    "train.tensorboard=false",
]
HALF = ["train.gradient_accumulation_steps=2", "train.per_device_train_batch_size=2"]
PACKED = ["data=alpaca_packed", f"data.path={REPOSITORY}/conf/data/smoke.jsonl", "data.max_seq_length=512"]
FIXED = ["data.pad_to_max_length=true"]
LAZY = [
    "runtime=gaudi_lazy", "runtime.pipelining_fwd_bwd=false", "runtime.use_fused_adam=false",
    "runtime.use_fused_clip_norm=false",
]  # fmt: skip
CHECKPOINTING = "train.gradient_checkpointing=true"
REENTRANT = "train.gradient_checkpointing_use_reentrant=true"
PROCESSES = {
    "cpu": ({"plain": [], "halves": HALF, "packed": PACKED, "fixed": [*FIXED, "train.max_steps=5"]}, "runtime=cpu"),
    "lazy": (
        {
            "plain": [],
            "pipelining": ["runtime.pipelining_fwd_bwd=true"],
            "halves": HALF,
            "halves, pipelining": [*HALF, "runtime.pipelining_fwd_bwd=true"],
            "fused": ["runtime.use_fused_adam=true", "runtime.use_fused_clip_norm=true"],
            "checkpointing": [CHECKPOINTING],
            "checkpointing, re-entrant": [CHECKPOINTING, REENTRANT],
            "graphs": ["runtime.use_hpu_graphs_for_inference=true"],
            "packed": PACKED,
        },
        *LAZY,
    ),
    "eager": ({"plain": [], "halves": HALF, "checkpointing": [CHECKPOINTING]}, "runtime=gaudi_eager"),
    # attention=eager: torch's engine falls back for parts of its sdpa, which stands behind the double's kernel
    "engine": (
        {"graphs": [*FIXED, "train.max_steps=5", "runtime.use_hpu_graphs_for_inference=true"]},
        *LAZY,
        "runtime.attention=eager",
    ),
}


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(DOUBLES / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    found = {**os.environ, "PATH": path, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{DOUBLES}", "OMP_NUM_THREADS": "1"}
    return {**found, **more}


@pytest.fixture(scope="session")
def runs(one_for_all):
    """runs("lazy") -> {case: what variants.py found, with its adapter}; each process runs once for all test workers."""
    home = one_for_all / "gaudi"
    home.mkdir(exist_ok=True)

    def process(name: str) -> dict[str, dict]:
        folder = home / name
        cases, *fixed = PROCESSES[name]
        with FileLock(home / f"{name}.lock"):
            if not (folder / "done").exists():
                folder.mkdir(exist_ok=True)
                listed = {case: [*COMMON, *fixed, *more] for case, more in cases.items()}
                (folder / "cases.json").write_text(json.dumps(listed))
                variables = environment(HABANA_DOUBLE_DEVICE="lazy" if name == "engine" else "cpu")
                if name == "cpu":
                    variables["PYTHONPATH"] = str(REPOSITORY)
                program = Path(__file__).with_name("variants.py")
                done = subprocess.run(
                    [sys.executable, str(program), str(folder), str(folder / "cases.json")],
                    env=variables, capture_output=True, text=True,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr[-4000:]
                (folder / "done").touch()
        found = {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}
        return {case: {**run, "adapter": load_file(folder / f"{case}.safetensors")} for case, run in found.items()}

    return process


CASES = [
    (name, case, "fixed" if name == "engine" else case if case in ("halves", "packed") else "plain")
    for name in ("lazy", "eager", "engine")
    for case in PROCESSES[name][0]
]
CASES = [(name, case, "halves" if case.startswith("halves") else reference) for name, case, reference in CASES]


@pytest.mark.parametrize(("name", "case", "reference"), CASES, ids=[f"{name}: {case}" for name, case, _ in CASES])
def test_gaudis_trainer_trains_to_transformers_numbers(runs, name, case, reference):
    stock, gaudi = runs("cpu")[reference], runs(name)[case]
    assert "GaudiTrainer" in gaudi["trainer"] and "GaudiTrainer" not in stock["trainer"]
    assert gaudi["losses"] == pytest.approx(stock["losses"], abs=1e-5)
    assert gaudi["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-5)
    assert gaudi["learning_rates"] == stock["learning_rates"]
    for found in (gaudi["results"]["eval_loss"], gaudi["eval_again"]):
        assert found == pytest.approx(stock["results"]["eval_loss"], abs=1e-5)
    for key in ("eval_accuracy", "eval_samples", "eval_targets"):
        assert gaudi["results"][key] == stock["results"][key]
    assert gaudi["adapter"].keys() == stock["adapter"].keys()
    for key, tensor in stock["adapter"].items():
        torch.testing.assert_close(gaudi["adapter"][key], tensor, rtol=0, atol=1e-5)


# Graph breaks of one optimizer step. The trainer's own: after backward and after the optimizer (each micro-batch its
# backward's), one more after forward with pipelining, two each for the fused optimizer and clipping. Ours: one a forward.
MARKS = {
    "plain": 3,
    "pipelining": 4,
    "halves": 5,
    "halves, pipelining": 7,
    "fused": 7,
    "checkpointing": 3,
    "checkpointing, re-entrant": 3,
    "graphs": 3,
    "packed": 3,
}


@pytest.mark.parametrize(("case", "marks"), MARKS.items())
def test_graph_breaks_of_a_step_are_the_contracts_and_ours(runs, case, marks):
    assert runs("lazy")[case]["marks"] == [marks] * 3


def test_graph_breaks_of_evaluation_are_the_contracts_and_ours(runs):
    lazy = runs("lazy")
    # A batch: ours, one in the prediction step, one in the loop. A replayed graph hears none of its own, and the trainer
    # leaves the prediction step's out
    assert lazy["plain"]["evaluation"]["mark_step"] == 4 * 3
    assert lazy["graphs"]["evaluation"] == {**lazy["graphs"]["evaluation"], "mark_step": 4, "graph_replay": 4}
    assert lazy["graphs"]["evaluation"].get("graph_capture", 0) == 0  # the shapes of the first evaluation come again


def test_eager_mode_asks_for_no_graph_break(runs):
    for run in runs("eager").values():
        assert set(run["marks"]) == {0}
        assert run["heard"].get("mark_step_in_eager", 0) == 0


def test_the_lazy_engine_compiles_nothing_after_warm_up(runs):
    compiled = runs("engine")["graphs"]["compiled"]
    assert compiled[0] > 0
    assert compiled[3] == compiled[4], compiled


def test_gaudis_kernels_and_optimizer_are_the_ones_that_run(runs):
    heard = runs("lazy")["fused"]["heard"]
    assert heard["FusedAdamW.step"] == heard["FusedClipNorm.clip_norm"] == 3
    forwards = 3 + 4  # three steps and one evaluation of four batches, two layers each
    assert heard["FusedSDPA"] == 2 * forwards
    assert heard["FusedRMSNorm"] == (2 * 2 + 1) * forwards
    assert heard["RotaryPosEmbeddingHelperV2"] == 2 * 2 * forwards


def test_the_model_is_built_after_the_trainers_arguments(runs):
    # Only then has its generation configuration the attributes that the trainer reads
    assert runs("lazy")["plain"]["generation_config"] == "GaudiGenerationConfig"


def test_memory_keys_are_optimum_habanas(runs):
    keys = ["max_memory_allocated (GB)", "memory_allocated (GB)", "total_memory_available (GB)"]
    assert runs("lazy")["plain"]["memory_keys"] == keys


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, warm_python):
    """recipe("runtime=gaudi_lazy", launcher=[...], HABANA_DOUBLE_CARDS="2") -> (log, journals of the ranks, process)."""

    def start(*overrides: str, launcher: tuple[str, ...] = (), script: str = "lora.py", **variables: str):
        folder = tmp_path_factory.mktemp("recipe")
        of_cpu = "runtime=cpu" in overrides
        command = [warm_python if of_cpu else sys.executable]
        if launcher:
            command += [str(REPOSITORY / "scripts" / "gaudi_spawn.py"), *launcher]
        common = COMMON if script == "lora.py" else COMMON[:1]
        command += [str(REPOSITORY / "recipes" / script), *common, f"hydra.run.dir={folder}/run", *overrides]
        journal = {"HABANA_DOUBLE_JOURNAL": str(folder / "journal")}
        variables = environment(**journal, **variables)
        variables["PYTHONPATH"] = "" if of_cpu else str(DOUBLES)
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        log = folder / "run" / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        journals = [json.loads(path.read_text()) for path in sorted(folder.glob("journal.*"))]
        return lines, journals, done

    return start


@pytest.mark.distributed
def test_zero3_on_two_ranks_with_deepspeeds_own_checkpoint(recipe, runs):
    """The real GaudiTrainer, DeepSpeed's engine with its HPU accelerator, its checkpoint function; "hccl" is gloo.

    The step's four rows come as two micro-batches of a row a rank, without pipelining: there optimum-habana leaves the division
    by the accumulation steps out.
    """
    log, journals, done = recipe(
        "runtime=gaudi_lazy", "deepspeed=zero3", CHECKPOINTING, REENTRANT, "runtime.pipelining_fwd_bwd=false",
        "train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=2",
        launcher=("--world_size", "2", "--use_deepspeed"), HABANA_DOUBLE_CARDS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    stock = runs("cpu")["plain"]
    steps = [line for line in log if "loss" in line]
    assert [line["loss"] for line in steps] == pytest.approx(stock["losses"], abs=1e-5)
    assert [line["grad_norm"] for line in steps] == pytest.approx(stock["grad_norms"], rel=1e-5)
    assert [line["eval_loss"] for line in log if "eval_loss" in line] == pytest.approx(
        [stock["results"]["eval_loss"]], abs=1e-5
    )
    folder = next(word for word in done.args if word.startswith("hydra.run.dir=")).partition("=")[2]
    saved = load_file(Path(folder) / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == stock["adapter"].keys()
    for key, tensor in stock["adapter"].items():
        torch.testing.assert_close(saved[key], tensor, rtol=0, atol=1e-5)
    ranks = [rank for rank in journals if rank["calls"].get("FusedAdamW.step")]
    assert len(ranks) == 2
    for rank in ranks:
        _environment_came_first(rank, lazy="1")
        assert rank["calls"]["FusedAdamW.step"] == 3
    assert "device        hpu, lazy, 2 rank(s), backend hccl" in done.stdout
    shipped = torch.__version__.startswith("2.10.")  # by the Gaudi release of the double
    assert ("warning       torch" in done.stdout + done.stderr) is not shipped


def test_a_direct_run_under_torch_compile(recipe):
    """In eager mode `import torch` loads the bridge: the environment must be complete by then."""
    small = ["model.config.num_hidden_layers=1", "adapter.target_modules=[q_proj]", "train.max_steps=2"]
    log, journals, done = recipe("runtime=gaudi_compile", *small)
    assert done.returncode == 0, done.stderr[-4000:]
    stock, _, _ = recipe("runtime=cpu", *small)
    for key in ("loss", "grad_norm", "eval_loss"):
        wanted = [line[key] for line in stock if key in line]
        assert [line[key] for line in log if key in line] == pytest.approx(wanted, rel=1e-5) and wanted, key
    assert "device        hpu, eager, 1 rank(s)" in done.stdout
    assert [line["step"] for line in log if "loss" in line] == [1, 2]
    _environment_came_first(journals[0], lazy="0")
    assert journals[0]["calls"].get("mark_step_in_eager", 0) == 0


def _environment_came_first(journal: dict, lazy: str) -> None:
    first = journal["events"][0]
    assert first["event"] == "import habana_frameworks.torch"
    assert first["environment"]["PT_HPU_LAZY_MODE"] == lazy
    assert first["environment"]["DS_ACCELERATOR"] == "hpu"
    assert set(first["modules"]) <= {
        "torch"
    }  # neither transformers nor DeepSpeed nor optimum-habana was there before it


def test_generation_with_hpu_graphs_gives_the_cpus_texts(recipe, tmp_path):
    """Captured once for each shape, in the first batch, and replayed; two buckets of prompts are two shapes."""
    prompts = ["Add.", "Name three colors.", "What is it?", "Say hello.", "x" * 150, "y" * 140]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    given = [f"generate.file={tmp_path}/prompts.txt", "generate.max_new_tokens=12", "generate.batch_size=2"]
    texts = {}
    for name, options in (
        ("cpu", ["runtime=cpu"]),
        ("graphs", ["runtime=gaudi_lazy", "runtime.use_hpu_graphs_for_inference=true"]),
    ):
        out = tmp_path / f"{name}.jsonl"
        _, journals, done = recipe(*given, *options, f"generate.output={out}", script="generate.py")
        assert done.returncode == 0, done.stderr[-3000:]
        texts[name] = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert texts["graphs"] == texts["cpu"] and len(set(texts["cpu"])) > 1
    (journal,) = journals
    _environment_came_first(journal, lazy="1")
    assert 0 < journal["calls"]["graph_capture"] <= 4


def test_generation_asks_for_the_graph_breaks_of_lazy_mode(recipe, tmp_path):
    _, (journal,), done = recipe(
        "runtime=gaudi_lazy", "generate.prompt=[Add.]", "generate.max_new_tokens=3", "generate.ignore_eos=true",
        f"generate.output={tmp_path}/out.jsonl", script="generate.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # The model's own in three forwards, one behind each token but the last, one before the first batch and one after it
    assert journal["calls"]["mark_step"] == 3 + 2 + 2


def test_without_pips_line_the_error_says_what_to_do(recipe, tmp_path):
    lone = tmp_path / "pip"
    lone.write_text("#!/bin/sh\nexit 0\n")
    lone.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(DOUBLES / "bin"), "/usr/bin", "/bin"])
    _, _, done = recipe("runtime=gaudi_lazy", PATH=path)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: optimum-habana cannot be imported: the `pip` of this PATH")
    )
