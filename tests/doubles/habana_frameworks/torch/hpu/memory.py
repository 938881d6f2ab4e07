"""Memory figures under the bridge's names, in bytes. Here they are the process's own; the limit is a Gaudi2's."""

from pathlib import Path

LIMIT = int(94.62 * 1024**3)


def _resident():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def _check(device):
    if not (device is None or isinstance(device, int) or str(device).startswith("hpu")):
        raise ValueError(f"Expected a hpu device, but got: {device}")


def memory_stats(device=None):
    _check(device)
    in_use, peak = _resident()
    return {
        "Limit": LIMIT,
        "InUse": in_use,
        "MaxInUse": peak,
        "NumAllocs": 0,
        "NumFrees": 0,
        "ActiveAllocs": 0,
        "MaxAllocSize": 0,
        "TotalSystemAllocs": 0,
        "TotalSystemFrees": 0,
        "TotalActiveAllocs": 0,
    }


def memory_allocated(device=None):
    return memory_stats(device)["InUse"]


def max_memory_allocated(device=None):
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device=None):
    return memory_stats(device)["Limit"]


def max_memory_reserved(device=None):
    return memory_stats(device)["Limit"]


def mem_get_info(device=None):
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]


def reset_peak_memory_stats(device=None):
    _check(device)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak counter starts anew


def reset_accumulated_memory_stats(device=None):
    _check(device)


def memory_summary(device=None):
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items())
