import re
from importlib import metadata
from pathlib import Path

import pytest

from recipes.pipeline import compatibility, runtime


@pytest.mark.parametrize(
    ("gaudi", "torch", "said"),
    [
        (None, "2.13.0", []),
        ("1.24.0.10", "2.10.0+hpu", []),
        ("1.24.1", "2.11.0", []),
        ("1.24.0", "2.9.0", ["its image ships torch 2.10;"]),
        ("1.24.0.10", "2.11.0", ["its image ships torch 2.10;"]),
        ("1.24.1.17", "2.10.0", ["its image ships torch 2.11;"]),
        ("1.24.2", "2.11.0", ["outside 1.21, 1.22, 1.23, 1.24.0, 1.24.1,"]),
        ("1.23.0", "2.9.0", ["validated with Gaudi software 1.24"]),
        ("1.21.3", "2.7.1", ["its image ships torch 2.6"]),
        ("1.19.0", "2.5.1", ["outside 1.21, 1.22, 1.23, 1.24.0, 1.24.1,"]),
    ],
)
def test_pairings_outside_the_table_are_said(monkeypatch, gaudi, torch, said):
    def version(package):
        found = {"habana-torch-plugin": gaudi, "torch": torch}[package]
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(compatibility.metadata, "version", version)
    lines = compatibility.gaudi_warnings()
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line


@pytest.mark.parametrize("root", ["lora", "generate"])
def test_each_recipe_says_it_at_its_start(compose, monkeypatch, capsys, root):
    monkeypatch.setattr(runtime, "gaudi_warnings", lambda: ["no pair"])
    monkeypatch.setattr(runtime, "_connect", lambda *_: None)
    asked = ["generate.held_out=true"] if root == "generate" else []
    runtime.start(compose("runtime=gaudi_lazy", *asked, root=root))
    assert capsys.readouterr().err == "warning       no pair\n"


def test_the_documented_table_is_the_one_that_is_checked():
    text = (Path(__file__).resolve().parents[3] / "docs" / "gaudi.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (1\.2[\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert dict(rows) == compatibility.TORCH_OF_GAUDI
