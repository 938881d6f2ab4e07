"""`--help`: every option of the schema, with its composed value and its words."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from recipes.pipeline.config import GenerateRecipe, LoraRecipe

REPOSITORY = Path(__file__).resolve().parents[3]


def keys(schema: type, prefix: str = ""):
    for name, kind in get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def helped(warm, tmp_path, recipe: str, *arguments: str) -> tuple[str, dict[str, str]]:
    """The text, and option -> "value words" of it."""
    done = warm(f"recipes/{recipe}.py", *arguments, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    options = done.stdout.partition("\nOptions ")[2]
    found = re.findall(r"^  (\S+?)=(.*(?:\n {10,}.*)*)", options, re.MULTILINE)
    return done.stdout, {key: " ".join(value.split()) for key, value in found}


def test_every_option_has_its_line_and_nothing_is_written(warm, tmp_path):
    text, options = helped(warm, tmp_path, "lora")
    assert list(options) and set(options) == set(keys(LoraRecipe))
    assert "python recipes/lora.py +experiment=smoke" in text
    for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"):
        assert re.search(rf"^  {path.stem}\s", text, re.MULTILINE)
    _, options = helped(warm, tmp_path, "generate")
    wanted = {key for key in keys(GenerateRecipe) if key.split(".")[0] not in ("train", "baseline")}
    assert set(options) == wanted
    assert not list(tmp_path.iterdir())


# Recipe, arguments; option -> its value, its choices and words
SHOWN = [
    ("lora", ["+experiment=70b"], {"train.per_device_train_batch_size": "10 rows"}),
    ("lora", ["train.learning_rate=3e-3"], {"train.learning_rate": "0.003 at its highest"}),
    (
        "lora",
        ["adapter.target_modules=[q_proj,v_proj]"],
        {
            "adapter.target_modules": "[q_proj, v_proj] names; all-linear: every one but the head",
            "runtime.lazy": "null graph (lazy) execution; null: on for devices hpu and lazy",
        },
    ),
    (
        "lora",
        ["model.dtype=bfloat16", "runtime.compile=true"],
        {
            "model.dtype": "bfloat16 float32 | bfloat16; of the frozen weights",
            "runtime.compile": "true torch.compile of the model; excludes lazy",
        },
    ),
    (
        "generate",
        ["data.system_prompt=costs 5$ and more"],
        {
            "data.system_prompt": "costs 5$ and more chat templates only",  # the dollar is Hydra's own sign
            # comments behind an option, above it, and inside the brackets of its default
            "generate.prompt": "[] texts: \"generate.prompt=['Name three colors.']\"",
            "data.template": "alpaca alpaca | alpaca_joined | llama2_chat | llama3_chat | tokenizer; alpaca_joined: no"
            " newline before the response, tokenised as one text (the measured 70B run); needs loss_on=all",
            "generate.length_bucket": "null prompts are padded to a multiple of this; null: 128 where graphs are kept,"
            " 1 in eager",
        },
    ),
]


@pytest.mark.parametrize(("recipe", "arguments", "shown"), SHOWN, ids=[" ".join(row[1]) for row in SHOWN])
def test_options_are_shown_with_value_choices_and_words(warm, tmp_path, recipe, arguments, shown):
    options = helped(warm, tmp_path, recipe, *arguments)[1]
    assert {key: options[key] for key in shown} == shown


def test_help_of_a_wrong_option_is_its_error(warm, tmp_path):
    done = warm("recipes/lora.py", "train.max_stepz=3", "--help", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: train.max_stepz: unknown key"), done.stderr


def test_a_reader_that_leaves_is_no_error(tmp_path):
    command = f"'{sys.executable}' '{REPOSITORY}/recipes/lora.py' --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "LoRA training and evaluation of Llama.\n", "")
