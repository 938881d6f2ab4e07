"""Where a run executes: device, ranks, environment, memory statistics.

`start` must come before the first import of torch on a Gaudi server: the bridge reads PT_HPU_LAZY_MODE and its like once,
and `import torch` itself loads it in eager mode. Nothing here imports torch at module level for that reason.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.pipeline import extension_locks
from recipes.pipeline.compatibility import gaudi_warnings
from recipes.pipeline.config import Device, InputError, LoraRecipe, RuntimeConfig

if TYPE_CHECKING:
    import torch

GIB = 1024**3
GAUDI_OPTIONS = (
    "flash_attention_recompute",
    "flash_attention_fast_softmax",
    "use_fused_adam",
    "use_fused_clip_norm",
    "pipelining_fwd_bwd",
    "use_hpu_graphs_for_inference",
)
GAUDI_VARIABLES = ("PT_", "HABANA_", "HLS_", "HCCL_", "DEEPSPEED_HPU_")
BACKENDS = {"hpu": "hccl", "cuda": "nccl", "cpu": "gloo", "lazy": "gloo"}


@dataclass
class Runtime:
    kind: str  # cpu, cuda, hpu, lazy
    lazy: bool  # graphs are built lazily, mark_step runs them
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    environment: dict[str, str] = field(default_factory=dict)  # what this run has set

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.kind, self.local_rank) if self.kind == "cuda" else torch.device(self.kind)

    @property
    def backend(self) -> str:
        return BACKENDS[self.kind]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.barrier()

    def leave(self) -> None:
        """Part from the other ranks in good order; the last thing of a run."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    @contextmanager
    def rank0_first(self) -> Iterator[None]:
        """Rank 0 runs the block alone (to fill a cache), then the other ranks do."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def mark_step(self) -> None:
        """Run the pending lazy graph; nothing elsewhere."""
        from modeling.execution import mark_step_for

        if self.lazy:
            mark_step_for(self.kind, lazy=True)()

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it; needed around a measured time."""
        import torch

        if self.kind == "cuda":
            torch.cuda.synchronize()
        elif self.kind == "hpu":
            torch.hpu.synchronize()
        elif self.kind == "lazy":
            torch._lazy.mark_step(wait=True)
            torch._lazy.wait_device_ops()

    def memory(self) -> dict[str, float]:
        """GiB under optimum-habana's keys: in use, peak, total. On the CPU they are the process's resident memory."""
        used, peak, total = self._memory_bytes()
        names = ("memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)")
        return {name: round(size / GIB, 2) for name, size in zip(names, (used, peak, total), strict=True)}

    def _memory_bytes(self) -> tuple[int, int, int]:
        import torch

        if self.kind == "hpu":
            stats = torch.hpu.memory_stats()
            return stats["InUse"], stats["MaxInUse"], stats["Limit"]
        if self.kind == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total
        import resource

        import psutil

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return psutil.Process().memory_info().rss, peak, psutil.virtual_memory().total


def start(cfg: LoraRecipe, connect: bool = True) -> Runtime:
    """Detect the device, set the environment, join the other ranks, seed. Raises InputError for a contradiction.

    `connect=False` stops after the environment: for plans, which must work on a machine without the cards.
    """
    if cfg.memory_curve and not cfg.debug:
        # Read when torch is imported: its profiler tells of each start, and of memory older than it, on the terminal
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    kind = _detect(cfg.runtime)
    lazy = lazy_mode(cfg.runtime, kind)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    runtime = Runtime(
        kind=kind,
        lazy=lazy,
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))),
        world_size=world_size,
        environment=environment(cfg, kind, lazy),
    )
    if kind == "hpu" and "habana_frameworks" in sys.modules and connect:
        raise InputError(
            "habana_frameworks was imported before the run's environment was set; start this recipe as a program"
        )
    os.environ.update(runtime.environment)
    if connect:
        if runtime.is_main:
            _warn(cfg.runtime, kind, lazy)
        _connect(cfg, runtime)
    return runtime


def _warn(options: RuntimeConfig, kind: str, lazy: bool) -> None:
    lines = gaudi_warnings() if kind == "hpu" else []
    if idle := without_effect(options, kind, lazy):
        lines.append(f"on {kind} these have no effect: {', '.join(idle)}")
    for line in lines:
        print(f"warning       {line}", file=sys.stderr, flush=True)


def lazy_mode(options: RuntimeConfig, kind: str) -> bool:
    """Whether a device of this kind executes lazily. Raises InputError where the configuration asks for what it cannot do."""
    lazy = options.lazy if options.lazy is not None else (kind in ("hpu", "lazy") and not options.compile)
    if lazy and kind not in ("hpu", "lazy"):
        raise InputError(
            f"runtime.lazy=true: device {kind} is not lazy; use runtime.device=lazy (torch's engine) or hpu"
        )
    if kind == "lazy" and not lazy:
        raise InputError("runtime.lazy=false: device lazy is always lazy; use runtime.device=cpu")
    return lazy


def without_effect(options: RuntimeConfig, kind: str, lazy: bool) -> list[str]:
    """Options meant for a Gaudi card that this device passes over, so that an experiment of such a card can be tried here."""
    found = []
    if kind != "hpu":
        found += [name for name in GAUDI_OPTIONS if getattr(options, name)]
        found += [f"environment.{name}" for name in options.environment if name.startswith(GAUDI_VARIABLES)]
    if not lazy:
        found += [name for name in ("mark_step", "layers_per_mark_step") if getattr(options, name)]
    return [f"runtime.{name}" for name in found]


def environment(cfg: LoraRecipe, kind: str, lazy: bool) -> dict[str, str]:
    """Variables the run needs before the device's software is imported. What the user has exported must agree."""
    wanted = {"TOKENIZERS_PARALLELISM": "false"} if cfg.train.dataloader_num_workers else {}
    if kind == "hpu":
        wanted["PT_HPU_LAZY_MODE"] = "1" if lazy else "0"
        if (
            cfg.runtime.use_hpu_graphs_for_inference
            and (cfg.runtime.cards or int(os.environ.get("WORLD_SIZE", "1"))) > 1
        ):
            wanted["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = "true"  # a collective cannot be captured otherwise
    if kind == "lazy":
        wanted["ACCELERATE_TORCH_DEVICE"] = "lazy"
    wanted["DS_ACCELERATOR"] = (
        "cpu" if kind == "lazy" else kind
    )  # transformers imports DeepSpeed wherever it is installed
    wanted.update({name: str(value) for name, value in cfg.runtime.environment.items()})
    for name, value in wanted.items():
        if os.environ.get(name, value) != value:
            said = "runtime.lazy" if name == "PT_HPU_LAZY_MODE" else "the configuration"
            raise InputError(
                f"{name}={os.environ[name]} in the environment, but {said} needs {value}; unset {name}, or change conf"
            )
    return wanted


def hpu_installed() -> bool:
    """Gaudi's torch bridge is on the path; asked without importing it (an import fixes its mode)."""
    return importlib.util.find_spec("habana_frameworks") is not None


def hpu_cards() -> int:
    """Gaudi cards of this machine, by their device nodes, else by hl-smi; the bridge is not imported for it."""
    if nodes := [node for node in Path("/dev/accel").glob("accel*") if node.name[5:].isdigit()]:
        return len(nodes)
    if shutil.which("hl-smi") is None:
        return 0
    listed = subprocess.run(["hl-smi", "-Q", "index", "-f", "csv"], capture_output=True, text=True, timeout=60)
    return sum(line.split(",")[0].strip().isdigit() for line in listed.stdout.splitlines())


def cards(kind: str) -> int:
    """Accelerator cards of this machine; 0 on a CPU."""
    if kind == "cuda":
        import torch

        return torch.cuda.device_count()
    return hpu_cards() if kind == "hpu" else 0


def _detect(runtime: RuntimeConfig) -> str:
    asked = runtime.device.name
    has_hpu = hpu_installed() and hpu_cards() > 0
    if asked != "auto":
        return asked
    if has_hpu:
        return "hpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _connect(cfg: LoraRecipe, runtime: Runtime) -> None:
    import torch

    if not cfg.debug:
        # DeepSpeed calls collectives by names that newer torch renames: one line a call
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if runtime.kind == "hpu":
        _import_habana()
    if runtime.kind == "cuda":
        if not torch.cuda.is_available():
            raise InputError("runtime.device=cuda: torch sees no CUDA device; use runtime=auto or runtime=cpu")
        torch.cuda.set_device(runtime.local_rank)
    if runtime.kind == "lazy":
        start_lazy_engine()
    if cfg.runtime.threads:
        torch.set_num_threads(cfg.runtime.threads)
    if runtime.world_size > 1 or cfg.deepspeed:
        _join(cfg, runtime)
    from transformers import logging, set_seed

    if not cfg.debug:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    set_seed(cfg.seed)  # the same on every rank: adapters start equal; the sampler shares out the rows


def start_lazy_engine() -> None:
    """Torch's own lazy tensor engine (device "lazy"): the stand-in for lazy execution on a machine without Gaudi."""
    import torch
    import torch._lazy
    import torch._lazy.ts_backend

    if not hasattr(torch, "lazy"):
        torch._lazy.ts_backend.init()
        # Checkpointing without re-entry asks for a module of the device's name.
        torch._register_device_module("lazy", LazyDevice)


class LazyDevice:
    """What torch.utils.checkpoint asks of a device module; random numbers are the CPU generator's."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def is_autocast_enabled() -> bool:
        return False


def _import_habana() -> None:
    if not hpu_installed():
        raise InputError(
            "runtime.device=hpu: habana_frameworks is not installed; run in Gaudi's image, or use runtime=cpu"
        )
    try:
        import habana_frameworks.torch.core  # noqa: F401
    except Exception as error:  # a stock torch raises AttributeError here, not ImportError
        raise InputError(
            f"runtime.device=hpu: habana_frameworks cannot be imported ({error}); is torch the vendor's?"
        ) from error


def _join(cfg: LoraRecipe, runtime: Runtime) -> None:
    """Join the process group before the model is loaded: ZeRO-3 cuts weights by a world size it must know by then."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if runtime.world_size > 1 and missing:
        raise InputError(
            f"WORLD_SIZE={runtime.world_size} but {missing[0]} is not set; launch through scripts/gaudi_spawn.py"
        )
    if runtime.world_size == 1:
        _single_rank_rendezvous()
    if cfg.deepspeed:
        extension_locks.clear()
        import deepspeed

        if runtime.kind == "cpu":
            # Only DeepSpeed's own injected layers call it, and it is compiled with g++ in each new environment
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(runtime.backend, auto_mpi_discovery=False, verbose=False)
    else:
        import torch.distributed as dist

        if runtime.backend == "hccl":
            import habana_frameworks.torch.distributed.hccl  # noqa: F401
        dist.init_process_group(runtime.backend)


def _single_rank_rendezvous() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone: Mapping[str, str] = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)


__all__ = [
    "GIB",
    "Device",
    "Runtime",
    "cards",
    "environment",
    "hpu_cards",
    "hpu_installed",
    "lazy_mode",
    "start",
    "start_lazy_engine",
    "without_effect",
]
