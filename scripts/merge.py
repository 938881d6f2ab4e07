"""A LoRA adapter merged into its base model: a model of its own, for transformers, this project's recipes and llama.cpp.

  python scripts/merge.py --adapter outputs/mine/adapter --output merged
  python scripts/merge.py --adapter outputs/mine/adapter --output merged --gguf --check
  python scripts/merge.py --adapter A B --weights 0.7 0.3 --base my_llama_folder --output merged

then    python recipes/generate.py model.name_or_path=merged "generate.prompt=['Name three colors.']"
        AutoModelForCausalLM.from_pretrained("merged")        llama-cli -m merged/merged-BF16.gguf

LoRA, rank-stabilised LoRA, DoRA, rank and alpha patterns, saved modules and biases, each by PEFT's own arithmetic in float32,
rounded once at the end. Several adapters: base + sum of weight * what each adapter alone changes. Streamed: memory does not
grow with the model (--gguf: one tensor; --check: the whole model). The output appears when it is whole, and nothing is
overwritten. Exit status: 0 merged, 1 --check found a difference (nothing is kept), 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.pipeline.compose import exit_on_error
from recipes.pipeline.config import InputError, ModelConfig
from scripts.arguments import OneLineParser

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
NOT_COPIED = ("config.json", "README.md", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="merge.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--adapter", type=Path, nargs="+", required=True, metavar="FOLDER", help="finished adapters")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="one for each adapter (default 1 each)")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder for the merged model")
    parser.add_argument(
        "--base", help="folder, FILE.gguf, package:NAME/FILE.gguf or hub id (default: what the adapter's config names)"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the output (default bfloat16)"
    )
    parser.add_argument("--gguf", action="store_true", help="also write OUTPUT/NAME-BF16.gguf (or -F32) for llama.cpp")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare logits with PEFT's unmerged model; needs memory for the whole model",
    )
    options = parser.parse_args(argv)
    options.weights = options.weights or [1.0] * len(options.adapter)
    if len(options.weights) != len(options.adapter):
        parser.error(f"--weights: {len(options.weights)} given for {len(options.adapter)} adapters")
    if not all(map(math.isfinite, options.weights)):
        parser.error(f"--weights {' '.join(map(str, options.weights))}: takes numbers")
    if options.output.exists() or options.output.is_symlink():
        raise InputError(f"--output {options.output}: exists already; nothing is overwritten, choose another folder")
    return options


def main(argv: list[str] | None = None) -> int:
    """Exit status, as the description says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the unfinished folder goes too
    with exit_on_error():
        options = parse(sys.argv[1:] if argv is None else argv)
        try:
            return merge(options)
        except InputError as error:  # of the recipes' code, which has other names for these options
            said = str(error).replace("adapter.path=", "--adapter ").replace("model.name_or_path=", "--base ")
            raise InputError(said) from error
        except OSError as error:
            raise InputError(f"{error.filename or options.output}: {error.strerror}; nothing was written") from error
        except KeyboardInterrupt:
            print("error: stopped by the keyboard; nothing was written", file=sys.stderr)
            return 130


def merge(options: argparse.Namespace) -> int:
    """Everything between a checked command line and the finished folder. Raises InputError, OSError."""
    from recipes.pipeline.adapter import adapter_folder

    options.adapter = [adapter_folder(path) for path in options.adapter]
    source, folder = find_base(options)
    job = plan(options, folder, str(source))
    output = options.output
    made = [folder for folder in output.absolute().parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        check_room(output.parent, job, options.gguf)
        return build(job, source, folder, options)
    finally:
        for parent in made:  # where there is no model in it
            with contextlib.suppress(OSError):
                parent.rmdir()


def build(job: Any, source: Path, folder: Path, options: argparse.Namespace) -> int:
    """Write and check the model in a folder beside the output, which then takes its name."""
    from scripts.merging import Tensors

    output = options.output
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        write(job, folder, options, temporary)
        config = written_config(temporary)
        if options.gguf:
            from scripts.gguf_file import write_gguf

            name = f"{output.name}-{'BF16' if options.dtype == 'bfloat16' else 'F32'}.gguf"
            print(f"writing       {name}", flush=True)
            merged = Tensors([temporary / file for file in job.files])
            write_gguf(
                temporary / name, temporary, merged, config, output.name, source if source.suffix == ".gguf" else None
            )
        if options.check:
            from scripts.merge_check import agreement

            report, same = agreement(folder, temporary, options.adapter, options.weights, options.dtype)
            print(report, flush=True)
            if not same:
                print("error: merged and unmerged model differ; nothing was kept", file=sys.stderr)
                return 1
        temporary.chmod(0o777 & ~_umask())
        if output.exists():
            raise InputError(f"--output {output}: was made by somebody else meanwhile; choose another folder")
        os.rename(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(summary(job, options))
    return 0


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def find_base(options: argparse.Namespace) -> tuple[Path, Path]:
    """(what --base means, the folder with its safetensors). Raises InputError."""
    from recipes.pipeline.adapter import read_adapter_config
    from recipes.pipeline.weights import check_folder, gguf_file, local_folder, locate

    name = options.base
    if name is None:
        name = read_adapter_config(options.adapter[0]).base_model_name_or_path
        if not name or not Path(name).exists():
            raise InputError(
                f"adapter {options.adapter[0]} was trained on {name or 'a model without a name'}, not here; give --base"
            )
    if name == "random":
        raise InputError("--base random: a random model has no weights on disk to merge into")
    model = ModelConfig(name_or_path=name)
    folder = local_folder(locate(name, model), model)
    check_folder(folder)
    return gguf_file(name) or folder, folder


def plan(options: argparse.Namespace, folder: Path, base_name: str) -> Any:
    """The scripts.merging.Merge to do, base and adapters held against each other. Raises InputError."""
    import torch

    from recipes.pipeline.adapter import MARKED, compare_bases, mark_of
    from recipes.pipeline.model import read_config
    from recipes.pipeline.weights import read_json, weight_files
    from scripts.merging import Adapter, Merge, Tensors

    if "quantization_config" in read_json(folder / "config.json"):
        raise InputError(
            f"{folder}: a quantised model; adapters are merged into the unquantised one: give it as --base"
        )
    config = read_config(folder, ModelConfig(name_or_path=str(folder)))
    adapters = [
        Adapter.of(path, weight, config, str(folder))
        for path, weight in zip(options.adapter, options.weights, strict=True)
    ]
    job = Merge(config, Tensors(weight_files(folder)), adapters, getattr(torch, options.dtype))
    for adapter in adapters:
        compare_bases(adapter.folder, str(folder), mark_of(job.base.rows(MARKED, 0, 1)))
    print(f"base          {base_name}")
    if base_name.endswith(".gguf"):
        print("              quantised: the adapter is merged into its de-quantised weights")
    for adapter in adapters:
        print(f"adapter       {adapter.folder}, weight {adapter.weight:g}, changes {len(adapter.changes)} tensors")
    if job.untied:
        print("head          tied in the base; the adapter changes one of the two, so it gets weights of its own")
    return job


def check_room(parent: Path, job: Any, gguf: bool) -> None:
    """Raises InputError where the disk is too small."""
    needed = sum(job.bytes(name) for names in job.files.values() for name in names) * (2 if gguf else 1)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise InputError(
            f"{parent}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free; choose another --output"
        )


def write(job: Any, folder: Path, options: argparse.Namespace, target: Path) -> None:
    """Weights, configuration, generation configuration, tokenizer and a record of the merge."""
    from tqdm import tqdm

    total = sum(job.bytes(name) for names in job.files.values() for name in names)
    with tqdm(total=total, desc="merging", unit="B", unit_scale=True) as bar:
        job.write(target, bar.update)
    for file in sorted(folder.iterdir()):  # tokenizer, chat template, licence
        if (
            file.is_file()
            and not file.name.startswith(".")
            and not file.name.endswith(WEIGHTS)
            and file.name not in NOT_COPIED
        ):
            shutil.copyfile(file, target / file.name)
    if not any(target.glob("tokenizer*")):  # a base without one: training has put its own beside the adapter
        for file in (f for pattern in TOKENIZER_FILES for f in options.adapter[0].glob(pattern)):
            shutil.copyfile(file, target / file.name)
    write_configs(job, folder, options, target)


def write_configs(job: Any, folder: Path, options: argparse.Namespace, target: Path) -> None:
    from transformers import GenerationConfig

    from recipes.pipeline.weights import read_json

    config = read_json(folder / "config.json") | {"torch_dtype": options.dtype, "architectures": ["LlamaForCausalLM"]}
    config.pop("_name_or_path", None)
    config.pop("dtype", None)
    if job.untied:
        config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = folder / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, target / generation.name)
    else:
        GenerationConfig.from_model_config(job.config).save_pretrained(target)
    record = {
        "base": options.base or str(folder),
        "adapters": [{"path": str(a.folder), "weight": a.weight} for a in job.adapters],
        "dtype": options.dtype,
    }
    (target / "merge.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def written_config(folder: Path) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(folder)


def summary(job: Any, options: argparse.Namespace) -> str:
    from recipes.pipeline.runtime import Runtime

    count = sum(job.bytes(name) for names in job.files.values() for name in names) // job.dtype.itemsize
    return (
        f"merged        {options.output}: {count:,} parameters, {options.dtype}, {len(job.files)} file(s)\n"
        f"peak memory   {Runtime('cpu', lazy=False).memory()['max_memory_allocated (GB)']:g} GiB"
    )


if __name__ == "__main__":
    sys.exit(main())
