"""Locks that a killed run has left on torch's extensions: the next run under DeepSpeed would wait for them for ever."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LONGEST_BUILD = 15 * 60  # seconds; another host may build in the same home folder, whose processes are not seen here


def folder() -> Path:
    """Where torch builds extensions, such as DeepSpeed's optimizers."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def clear() -> None:
    """Removes the locks that no process holds and that are older than any build; says what it removes and what it leaves."""
    for lock in _left_behind():
        with suppress(FileNotFoundError):  # another rank was first
            if time.time() - lock.stat().st_mtime > LONGEST_BUILD:
                lock.unlink()
                said = "left by a run that was killed; removed"
            else:
                said = "no process here holds it, and DeepSpeed waits until it is gone; remove it unless another host builds"
            print(f"warning       {lock}: {said}", file=sys.stderr, flush=True)


def _left_behind() -> Iterator[Path]:
    found = [path for depth in ("*/lock", "*/*/lock") for path in folder().glob(depth)]
    if found and Path("/proc/self/fd").is_dir():
        held = _open_files()
        yield from (path for path in found if os.path.realpath(path) not in held)


def _open_files() -> set[str]:
    """Of this user's processes; torch keeps a lock open while it builds."""
    paths = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for handle in os.listdir(process / "fd"):
                with suppress(OSError):
                    paths.add(os.readlink(process / "fd" / handle))
    return paths
