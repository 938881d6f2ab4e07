"""Every call of Gaudi's software, from our code to the published contract: the table is tests/doubles/contract.yaml.

The double must have what the table says, our code must call nothing that is not in it, and the table must name no caller
that has stopped calling.
"""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
DOUBLES = REPOSITORY / "tests" / "doubles"
TABLE = yaml.safe_load((DOUBLES / "contract.yaml").read_text(encoding="utf-8"))
OURS = sorted(path for folder in ("recipes", "modeling", "scripts") for path in (REPOSITORY / folder).rglob("*.py"))


def calls_of(path: Path) -> set[str]:
    """Full names of what a file imports from habana_frameworks or reads off torch.hpu."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("habana_frameworks"):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("habana_frameworks")}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.hpu."):
            found.add("habana_frameworks." + ast.unparse(node))
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


def of_table(name: str) -> dict | None:
    """The row of a name; a class's row may be that of its only method."""
    return next((row for row in TABLE if row["api"] in (name, f"{name}.apply")), None)


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_our_code_calls_what_the_contract_has(path):
    caller = path.relative_to(REPOSITORY).as_posix()
    called = calls_of(path)
    for name in called:
        row = of_table(name)
        assert row is not None, f"{caller} uses {name}, which no line of the contract covers"
        assert caller in row["used_by"], f"{row['api']}: {caller} is missing from used_by"
    promised = {row["api"] for row in TABLE if caller in row["used_by"]}
    assert promised == {of_table(name)["api"] for name in called}


def test_each_line_has_a_source_and_a_caller():
    for row in TABLE:
        assert row["source"] and row["used_by"], row
        for caller in row["used_by"]:
            assert (REPOSITORY / caller).is_file() or caller in (
                "optimum-habana",
                "accelerate",
                "transformers",
                "deepspeed",
                "bridge",
            )
    names = [row["api"] for row in TABLE]
    assert len(names) == len(set(names))


PROGRAM = """
import importlib, inspect, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    parts, thing = name.split("."), None
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
            break
        except ImportError:
            continue
    for part in parts[cut:]:
        thing = getattr(thing, part, None)
    if thing is None:
        found[name] = None
    elif inspect.ismodule(thing):
        found[name] = "module"
    else:
        found[name] = str(inspect.signature(thing))
print(json.dumps(found))
"""


def signatures(lazy: str) -> dict[str, str | None]:
    environment = {"PYTHONPATH": str(DOUBLES), "PT_HPU_LAZY_MODE": lazy, "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    names = json.dumps([row["api"] for row in TABLE])
    done = subprocess.run([sys.executable, "-c", PROGRAM, names], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def lazy():
    return signatures("1")


def test_the_double_has_every_line_with_its_signature(lazy):
    for row in TABLE:
        assert lazy[row["api"]] is not None, f"the double lacks {row['api']}"
        if "signature" in row:
            assert lazy[row["api"]] == row["signature"], row["api"]


def test_what_is_lazy_only_is_missing_in_eager_mode():
    eager = signatures("0")
    lacking = {name for name, found in eager.items() if found is None}
    assert lacking == {row["api"] for row in TABLE if row.get("lazy_only")}


# Programs for the double, all in one process: name -> text, and what its output or its error must end with

REFUSED = {
    "synchronize takes nothing": ("torch.hpu.synchronize(0)", "takes 0 positional arguments"),
    "no such reset": ("torch.hpu.reset_max_memory_allocated()", "has no attribute 'reset_max_memory_allocated'"),
    "another device": ("torch.hpu.memory_stats(torch.device('cpu'))", "Expected a hpu device"),
    "another card": ("torch.hpu.random.set_rng_state(torch.hpu.random.get_rng_state(), 'hpu:1')", "one card a process"),
    "positional only": (
        """q = torch.ones(1, 2, 3, 4)
        kernels.FusedSDPA.apply(q, q, q, attn_mask=None)""",
        "no keyword arguments",
    ),
    "causal or a mask": (
        """q = torch.ones(1, 2, 3, 4)
        kernels.FusedSDPA.apply(q, q, q, torch.zeros(1, 1, 3, 3), 0.0, True)""",
        "is_causal with a mask",
    ),
    "four arguments": (
        """tables = [torch.ones(1, 1, 3, 4)] * 2
        kernels.RotaryPosEmbeddingHelperV2.apply(torch.ones(1, 2, 3, 4), *tables, torch.zeros(1, 3).long(), 0)""",
        "takes 4 positional arguments",
    ),
    "one dtype": (
        "normalization.FusedRMSNorm.apply(torch.ones(2, 4), torch.ones(4, dtype=torch.bfloat16), 1e-5)",
        "x is torch.float32",
    ),
    "an empty group": ("optimizers.FusedAdamW([{'params': []}]).step()", "a parameter group is empty"),
    "graphs detach": (
        "torch.hpu.wrap_in_hpu_graph(torch.nn.Linear(2, 2))(torch.ones(1, 2))",
        "HPU graphs detach gradients",
    ),
    "a graph that Python would change": (
        """class Moody(torch.nn.Module):
            calls = 0
            def forward(self, x):
                self.calls += 1
                return x + 1 if self.calls == 1 else x * 2
        module = torch.hpu.wrap_in_hpu_graph(Moody())
        with torch.no_grad():
            module(torch.ones(2)), module(torch.ones(2))""",
        "Python state or data decided something",
    ),
}
COMPUTED = {
    "graphs by shape and constant, replayed into the same memory": (
        """class Scale(torch.nn.Module):
            def forward(self, x, factor=1.0):
                core.mark_step()
                return x * factor
        module = torch.hpu.wrap_in_hpu_graph(Scale())
        with torch.no_grad():
            first = module(torch.ones(2))
            second = module(torch.ones(2) * 3)
            module(torch.ones(2), factor=2.0)
            module(torch.ones(4))
        print(first is second, first.tolist(), dict(habana_double.calls))""",
        "True [3.0, 3.0] {'mark_step': 3, 'graph_capture': 3, 'graph_replay': 1}",
    ),
    "optimizer and clipping as torch's": (
        """torch.manual_seed(0)
        ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
        fused = optimizers.FusedAdamW([ours], lr=1e-2, eps=1e-12, weight_decay=0.1)
        stock = torch.optim.AdamW([theirs], lr=1e-2, eps=1e-12, weight_decay=0.1)
        for _ in range(3):
            gradient = torch.randn(8)
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            norm = normalization.FusedClipNorm([ours], 0.5).clip_norm([ours])
            assert norm.shape == (1,)
            torch.testing.assert_close(norm[0], torch.nn.utils.clip_grad_norm_([theirs], 0.5))
            fused.step(), stock.step()
            torch.testing.assert_close(ours, theirs)
        print(dict(habana_double.calls))""",
        "{'FusedClipNorm.clip_norm': 3, 'mark_step': 12, 'FusedAdamW.step': 3}",
    ),
}
LAZY = {
    "a graph that waits for data": (
        """class Curious(torch.nn.Module):
            def forward(self, x):
                return x + 1 if (x + 1).sum().item() > 0 else x
        with torch.no_grad():
            torch.hpu.wrap_in_hpu_graph(Curious())(torch.ones(2, device="hpu"))""",
        "cpu fallback is not supported during hpu graph capturing",
    ),
    "mark_step cuts the lazy engine's graph and runs closures": (
        """total = torch.ones(4, device="hpu") * 2
        import torch._lazy.metrics as metrics
        before = metrics.counter_value("MarkStep") or 0
        core.step_closure.add_step_closure(lambda: print("closure", end=" "))
        core.mark_step()
        print(total.device.type, metrics.counter_value("MarkStep") - before, dict(habana_double.calls))""",
        "closure lazy 1 {'mark_step': 1}",
    ),
}
EAGER = {
    "mark_step in eager mode": (
        "core.mark_step(); print(dict(habana_double.calls))",
        "{'mark_step_in_eager': 1}",
    ),
}
RUNNER = """
import contextlib, io, json, sys, torch, habana_double
import habana_frameworks.torch.core as core
from habana_frameworks.torch.hpex import kernels, normalization, optimizers
found = {}
for name, text in json.load(sys.stdin).items():
    habana_double.calls.clear()
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(text, dict(globals()))
        found[name] = out.getvalue().strip()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def outcomes(programs: dict[str, tuple[str, str]], **variables: str) -> dict[str, str]:
    environment = {"PYTHONPATH": str(DOUBLES), "PT_HPU_LAZY_MODE": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    texts = json.dumps({name: inspect.cleandoc(text) for name, (text, _) in programs.items()})
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=texts, capture_output=True, text=True, env=environment | variables
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("programs", "variables"),
    [
        ({**REFUSED, **COMPUTED}, {}),
        (LAZY, {"HABANA_DOUBLE_DEVICE": "lazy"}),
        (EAGER, {"PT_HPU_LAZY_MODE": "0"}),
    ],
    ids=["lazy mode", "torch's lazy engine", "eager mode"],
)
def test_the_double_refuses_and_computes_what_the_card_does(programs, variables):
    found = outcomes(programs, **variables)
    for name, (_, wanted) in programs.items():
        assert wanted in found[name], f"{name}: {found[name]}"


def test_import_torch_loads_the_bridge_except_in_lazy_mode():
    for lazy, loaded in (("1", False), ("0", True)):
        environment = {"PYTHONPATH": str(DOUBLES), "PT_HPU_LAZY_MODE": lazy, "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
        text = "import sys, torch; print('habana_frameworks.torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == str(loaded), done.stderr
