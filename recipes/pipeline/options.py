"""`--help` of the recipes: every option with its value in the composed configuration and config.py's own words on it."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import shutil
import textwrap
import tokenize
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from recipes.pipeline import config

REPOSITORY = Path(__file__).resolve().parents[2]
USAGE = {
    "lora": """LoRA training and evaluation of Llama.

python recipes/lora.py +experiment=NAME [KEY=VALUE ...]

  python recipes/lora.py +experiment=smoke                                  a training in minutes, anywhere
  python recipes/lora.py +experiment=smoke data.path=my_records.json        on your own records
  python recipes/lora.py +experiment=70b dry_run=true                       the plan of a run: cards, batches, memory
  python recipes/lora.py +experiment=smoke train.do_train=false adapter.path=outputs/mine/adapter     evaluation only
  python scripts/gaudi_spawn.py --world_size 8 --use_deepspeed recipes/lora.py +experiment=70b        on eight cards""",
    "generate": """Completions of prompts by Llama and its adapter.

python recipes/generate.py [+experiment=NAME] [KEY=VALUE ...]

  python recipes/generate.py "generate.prompt=['Name three colors.']"                one prompt, streamed
  python recipes/generate.py generate.file=prompts.jsonl generate.batch_size=auto    a file of prompts, answers in the run folder
  python recipes/generate.py +experiment=smoke generate.held_out=true adapter.path=outputs/mine/adapter
  python recipes/generate.py +experiment=70b_generate dry_run=true                   the plan of a run: cards, memory""",
}
GROUPS = "model data adapter runtime deepspeed baseline"
NOT_FOR = {"lora": (), "generate": ("train", "baseline")}  # what a recipe reads past
COLUMN = 44  # where the words on an option begin


def option_help(name: str, schema: type, composed: DictConfig) -> str:
    """Text of `recipes/<name>.py --help` for a composed configuration, which need be neither complete nor possible."""
    width = max(80, min(130, shutil.get_terminal_size((120, 24)).columns))
    lines = [USAGE[name], "", "Experiments (+experiment=NAME; conf/experiment):"]
    for path in sorted((REPOSITORY / "conf" / "experiment").glob("*.yaml")):
        lines += _entry(f"  {path.stem}", _first_sentence(path), width, 26)
    lines += ["", "Groups (GROUP=NAME; the files of conf/GROUP):"]
    for group in GROUPS.split():
        names = ", ".join(path.stem for path in sorted((REPOSITORY / "conf" / group).glob("*.yaml")))
        lines += _entry(f"  {group}", names, width, 26)
    lines += ["", "Options (KEY=VALUE), with the values that this command line gives them:"]
    for key, value, words in _options(schema, composed, NOT_FOR[name]):
        if key is None:
            lines.append("")
        else:
            lines += _entry(f"  {key}={value}", words, width, COLUMN)
    lines += ["", "--cfg job prints the configuration as YAML; --hydra-help shows Hydra's own flags."]
    return "\n".join(lines)


def _options(schema: type, composed: DictConfig, left_out: tuple[str, ...], prefix: str = "") -> Iterator[tuple]:
    """(key, value, words) of each option; (None, "", "") before each group."""
    types, words = get_type_hints(schema), _words(schema)
    # What stands outside groups comes first
    for field in sorted(
        dataclasses.fields(schema), key=lambda one: not prefix and dataclasses.is_dataclass(types[one.name])
    ):
        kind, key = types[field.name], prefix + field.name
        if key in left_out:
            continue
        if dataclasses.is_dataclass(kind):
            if not prefix:
                yield None, "", ""
            yield from _options(kind, composed[field.name], left_out, f"{key}.")
        else:
            yield key, _shown(composed, field.name), _join(_choices(kind), words.get(field.name, ""))


def _shown(composed: DictConfig, name: str) -> str:
    if OmegaConf.is_missing(composed, name):
        return ""
    value = composed[name]
    if OmegaConf.is_config(value):
        plain = OmegaConf.to_container(value, resolve=True)
        text = json.dumps(plain, ensure_ascii=False).replace('"', "")
        return text if len(text) <= COLUMN else f"{text[: COLUMN - 4]} ..."
    if isinstance(value, Enum):
        return value.value
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _choices(kind: Any) -> str:
    for one in (kind, *getattr(kind, "__args__", ())):
        if isinstance(one, type) and issubclass(one, Enum):
            return " | ".join(choice.value for choice in one)
    return ""


def _join(choices: str, words: str) -> str:
    return "; ".join(part for part in (choices, words) if part)


def _words(schema: type) -> dict[str, str]:
    """Field -> the comment above or behind it in config.py, its own or inherited; a blank line parts what heads several."""
    found: dict[str, str] = {}
    source = Path(config.__file__).read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for owner in reversed([base.__name__ for base in schema.__mro__ if base.__name__ in classes]):
        for node in classes[owner].body:
            if not isinstance(node, ast.AnnAssign):
                continue
            above = node.lineno - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            at = [*range(above + 1, node.lineno), *range(node.lineno, node.end_lineno + 1)]
            found[node.target.id] = " ".join(comments[line] for line in at if line in comments)
    return found


def _first_sentence(path: Path) -> str:
    head = " ".join(re.findall(r"^# (?!@|  )(.+)$", path.read_text(encoding="utf-8").split("\n\n")[0], re.MULTILINE))
    return re.split(r"(?<=[^.\d])\. ", head)[0].rstrip(".")


def _entry(term: str, words: str, width: int, column: int) -> list[str]:
    if not words:
        return [term]
    wrapped = textwrap.wrap(words, width - column)
    first = [term, " " * column + wrapped[0]] if len(term) > column - 2 else [term.ljust(column) + wrapped[0]]
    return [*first, *(" " * column + line for line in wrapped[1:])]
