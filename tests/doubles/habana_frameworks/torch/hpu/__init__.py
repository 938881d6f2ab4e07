"""torch.hpu: cards, memory, streams, random numbers; graphs in lazy mode only."""

from contextlib import contextmanager

import habana_double
from habana_frameworks.torch.hpu import metrics, random
from habana_frameworks.torch.hpu.memory import (
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from habana_frameworks.torch.hpu.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from habana_frameworks.torch.utils.internal import is_lazy

import torch

if is_lazy():  # in eager mode these names do not exist
    from habana_frameworks.torch.hpu.graphs import is_current_stream_capturing, wrap_in_hpu_graph  # noqa: F401

_state = {"initialized": False, "dynamic": None, "autocast": False, "recompute": True}


def init():
    _state["initialized"] = True


def is_initialized():
    return _state["initialized"]


def device_count():
    return habana_double.CARDS


def is_available():
    return device_count() > 0


def current_device():
    init()
    return 0  # the bridge gives each process one card


def set_device(device):
    init()


def get_device_name(device=None):
    return "GAUDI2"


def get_device_capability(device=None):
    return "1.24.0"


def get_device_properties(device=None):
    return {"name": "GAUDI2", "total_memory": memory_stats()["Limit"]}


def is_bf16_supported():
    return True


def synchronize():
    habana_double.count("synchronize")
    if habana_double.DEVICE == "lazy":
        torch._lazy.mark_step(wait=True)
        torch._lazy.wait_device_ops()


def enable_dynamic_shape():
    _state["dynamic"] = True
    habana_double.note("enable_dynamic_shape")


def disable_dynamic_shape():
    _state["dynamic"] = False
    habana_double.note("disable_dynamic_shape")


def get_dynamic_shape_status():
    return _state["dynamic"]


def is_autocast_hpu_enabled():
    return _state["autocast"]


def set_autocast_hpu_enabled(enabled):
    _state["autocast"] = enabled


def get_autocast_hpu_dtype():
    return torch.bfloat16


def set_autocast_hpu_dtype(dtype):
    pass


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


def enable_recompute_sdp(enabled):
    _state["recompute"] = enabled


def recompute_sdp_enabled():
    return _state["recompute"]


@contextmanager
def sdp_kernel(enable_recompute=True):
    before, _state["recompute"] = _state["recompute"], enable_recompute
    try:
        yield
    finally:
        _state["recompute"] = before


class device:
    """Context manager that checkpointing opens around a device's random state."""

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class Stream:
    """Work on it is done at once."""

    def __init__(self, device=None, priority=0):
        self.device = device

    def wait_stream(self, stream):
        return None

    def wait_event(self, event):
        return None

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        synchronize()


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.recorded = None

    def record(self, stream=None):
        import time

        self.recorded = time.perf_counter()

    def wait(self, stream=None):
        return None

    def query(self):
        return True

    def synchronize(self):
        return None

    def elapsed_time(self, end):
        return (end.recorded - self.recorded) * 1000


_default_stream = Stream()


def current_stream(device=None):
    return _default_stream


def default_stream(device=None):
    return _default_stream


@contextmanager
def stream(stream):
    yield


__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "metrics",
    "random",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]
