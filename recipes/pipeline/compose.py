"""From a command line to a checked configuration: Hydra, run folder, and errors of one line.

`@recipe("lora")` turns a function of a `LoraRecipe` into a program. The function receives plain dataclasses (no OmegaConf
containers), so nothing downstream can write a ListConfig into a JSON file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.pipeline.config import GenerateRecipe, InputError, LoraRecipe, check

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMAS = {"lora": LoraRecipe, "generate": GenerateRecipe}
KEPT = {"lora": "finished checkpoints are kept", "generate": "finished batches are kept; the same command goes on"}
# Names of the rank's variables under torchrun and DeepSpeed, and under Open MPI.
RANK_VARIABLES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}

AGAIN = """defaults:
  - override hydra/job_logging: disabled
  - override hydra/hydra_logging: disabled
  - _self_
hydra:
  run:
    dir: outputs/${hydra:job.name}/${run_stamp:}
  job:
    name: RECIPE
  output_subdir: null
"""


def recipe(name: str) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Decorator: run `function(cfg)` with conf/<name>.yaml and the command line. Exit status 2 after a user's error."""

    def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
        def program() -> None:
            debug = "debug=true" in (argument.lower() for argument in sys.argv)
            try:
                _run(name, function)
            except KeyboardInterrupt:
                _fail(f"stopped by the keyboard; {KEPT[name]}", 130)
            except (InputError, HydraException, OmegaConfBaseException) as error:
                if debug:
                    raise
                _fail(explain(error, SCHEMAS[name]), 2)

        program.recipe = function  # the pipeline itself, for a configuration at hand
        return program

    return decorate


def compose_here(overrides: list[str], name: str = "lora") -> Any:
    """The configuration of a command line, for programs that are no recipes. Raises what `exit_on_error` explains."""
    _register(name)
    with hydra.initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return resolve(hydra.compose(name, overrides=overrides), SCHEMAS[name])


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with status 2 and one line for a user's error."""
    try:
        yield
    except (InputError, HydraException, OmegaConfBaseException) as error:
        _fail(explain(error), 2)


def run_folder() -> Path:
    """Folder of this run's results (`hydra.run.dir`), the same on every rank."""
    return Path(HydraConfig.get().runtime.output_dir)


def _run(name: str, function: Callable[[Any], None]) -> None:
    _take_launcher_arguments()
    _register(name)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its exceptions on instead of printing them

    refused: list[InputError] = []

    def task(cfg: DictConfig) -> None:
        try:
            function(resolve(cfg, SCHEMAS[name]))
        except InputError as error:  # kept from Hydra, which would print lines of its own around it
            refused.append(error)
        except BrokenPipeError:
            _reader_left()
        except OSError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            if run_folder().is_dir() and not any(run_folder().iterdir()):
                run_folder().rmdir()

    try:
        hydra.main(version_base="1.3", config_path=str(REPOSITORY / "conf"), config_name=name)(task)()
    except HydraException:
        raise
    except BrokenPipeError:  # while Hydra printed the help
        _reader_left()
    except OSError as error:  # the task's own are wrapped above: this one is Hydra's, making the run folder
        raise InputError(
            f"hydra.run.dir: cannot make {error.filename}: {error.strerror}; choose another folder"
        ) from error
    if refused:
        raise refused[0]


def _reader_left() -> None:
    """Nobody reads our output any more (`| head`): what is still to be written goes nowhere, and that is no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _register(name: str) -> None:
    ConfigStore.instance().store(f"{name}_schema", SCHEMAS[name])
    stamp = _run_stamp()
    OmegaConf.register_new_resolver("run_stamp", lambda: stamp, replace=True)
    OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
    OmegaConf.register_new_resolver("option_help", _help, replace=True)


def _help(name: str, *, _root_: DictConfig) -> str:
    from recipes.pipeline.options import option_help

    return option_help(name, SCHEMAS[name], _root_).replace("$", "$$")  # Hydra fills its own words in


def resolve(cfg: DictConfig, schema: type) -> Any:
    """The configuration as an instance of `schema`, every key and cross-field rule checked. Raises InputError."""
    if cfg._metadata.object_type is not schema:  # a configuration that a run has written
        cfg = OmegaConf.merge(OmegaConf.structured(schema), cfg)
    unknown = _unknown_keys(cfg, schema)
    if unknown:
        key, known = unknown[0]
        raise InputError(_unknown_key(key, known))
    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise InputError(f"{sorted(missing)[0]}: no value; give one: {sorted(missing)[0]}=VALUE")
    typed = OmegaConf.to_object(cfg)
    check(typed)
    return typed


def to_yaml(cfg: Any) -> str:
    """The resolved configuration as a whole Hydra configuration: it runs again by itself, as its first line says."""
    name = next(name for name, schema in SCHEMAS.items() if type(cfg) is schema)
    header = f"# Run again:  python recipes/{name}.py --config-path FOLDER_OF_THIS_FILE --config-name config"
    again = AGAIN.replace("RECIPE", name)
    return f"{header}\n{again}{OmegaConf.to_yaml(OmegaConf.structured(cfg))}"


def _unknown_keys(cfg: DictConfig, schema: type, prefix: str = "") -> list[tuple[str, list[str]]]:
    # `+key=value` opens Hydra's struct, so the composed tree is held against the schema once more.
    defaults = schema()
    names = [f.name for f in dataclasses.fields(schema)]
    found = [(prefix + key, names) for key in cfg if key not in names]
    for name in names:
        value = getattr(defaults, name)
        if dataclasses.is_dataclass(value):
            found += _unknown_keys(cfg[name], type(value), f"{prefix}{name}.")
    return found


def _take_launcher_arguments() -> None:
    """Rank from `--local_rank=N` and from Open MPI's variables; one rank only writes Hydra's files."""
    for ours, theirs in RANK_VARIABLES.items():
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    for argument in list(sys.argv[1:]):
        if match := re.fullmatch(r"--local[_-]rank=(\d+)", argument):
            os.environ.setdefault("LOCAL_RANK", match[1])
            sys.argv.remove(argument)


def _run_stamp() -> str:
    """Name of the run folder: the launcher's, so that all ranks share it, else the time and four random digits."""
    if stamp := os.environ.get("RUN_STAMP"):
        return stamp
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"
    if int(os.environ.get("WORLD_SIZE", "1")) != int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        return "set-hydra.run.dir"  # several hosts without scripts/gaudi_spawn.py: refused in start()
    import psutil

    born = psutil.Process().parent().create_time()  # ranks of one host have one parent
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(born))}-{int(born * 1000) % 0x10000:04x}"


def _fail(message: str, status: int) -> None:
    rank = os.environ.get("RANK", "0")
    distributed = sys.modules.get("torch.distributed")
    if rank != "0" and not (distributed and distributed.is_initialized()):
        time.sleep(2)  # every rank has found the same: rank 0 says it before the launcher ends the others
        sys.exit(status)
    where = f"rank {rank}: " if rank != "0" else ""
    print(f"{where}error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def explain(error: Exception, schema: type = LoraRecipe) -> str:
    """One line for an error of composing: the key, the value, what is allowed, near misses."""
    text = str(error)
    if isinstance(error, InputError):
        return " ".join(text.split())
    cause = error.__cause__
    while cause is not None:
        text += "\n" + str(cause)
        cause = cause.__cause__
    where = f"conf/{match[1]}.yaml: " if (match := re.search(r"^In '(.+?)': \w+ raised", text)) else ""
    if match := re.search(
        r"Could not find '(.+?)/([^/']+)'\n\nAvailable options in '.+?':\n((?:\t.+\n?)+?)Config search", text
    ):
        return f"{match[1]}={match[2]}: no such file in conf/{match[1]}" + _options(match[2], match[3].split())
    if match := re.search(r"Key '(.+?)' (?:is )?not in '?(\w+)'?\n\s+full_key: (\S+)", text):
        return where + _unknown_key(match[3], _names_of(match[3].rpartition(".")[0], schema))
    if match := re.search(r"Could not override '(\w+)'\. No match in the defaults list", text):
        return f"{match[1]}: this group is not in the defaults list; add it with a plus sign: +{match[1]}=NAME"
    if match := re.search(r"full_key: (\S+)", text):
        return f"{where}{match[1]}: {_type_error(text, match[1], schema)}"
    if "Ambiguous value" in text or "mismatched input" in text or "Error parsing override" in text:
        argument = re.search(r"(?:argument|override) '(.+?)'(?:\n|$)", text)
        return (
            f"cannot read {argument[1] if argument else 'the command line'}: write KEY=VALUE, and quote a value that holds"
            " a comma, '=', space or brackets for both shell and Hydra: \"key='a, b'\""
        )
    return where + " ".join(text.split())


def _type_error(text: str, key: str, schema: type) -> str:
    allowed = {"Integer": "a whole number", "Float": "a number"}
    if match := re.search(r"Value '(.*)' of type '.+' could not be converted to (\w+)", text):
        return f"{match[1]!r} is not {allowed.get(match[2], match[2])}"
    if match := re.search(r"Invalid value '(.*)', expected one of \[(.+)\]", text):
        return f"{match[1]!r} is not one of its values" + _options(match[1], match[2].split(", "))
    if match := re.search(r"Value '(.*)' is not a valid bool", text):
        return f"{match[1]!r} is not true or false"
    if "is not a ListConfig, list or tuple" in text:
        return f"takes a list: {key}=[a,b]"
    if "is not a subclass of" in text:
        return "is a group of keys; set one of them, as in " + ", ".join(
            f"{key}.{name}" for name in _names_of(key, schema)[:3]
        )
    first = next((line for line in text.splitlines() if "full_key" not in line and "Error merging" not in line), text)
    return first.strip()


def _names_of(prefix: str, schema: type) -> list[str]:
    node: Any = schema()
    for part in filter(None, prefix.split(".")):
        node = getattr(node, part, None)
    return [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []


def _unknown_key(key: str, known: list[str]) -> str:
    prefix, _, name = key.rpartition(".")
    if not known:
        return f"{key}: unknown key; to add one to this dictionary write +{key}=VALUE"
    return f"{key}: unknown key" + _options(name, [f"{prefix}.{n}" if prefix else n for n in known], key)


def _options(wrong: str, options: list[str], full: str | None = None) -> str:
    near = difflib.get_close_matches(full or wrong, options, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    shown = ", ".join(options[:16]) + (", ... (--help lists all)" if len(options) > 16 else "")
    return f"; there is {shown}"
