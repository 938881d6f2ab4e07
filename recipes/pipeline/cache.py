"""Tokenised splits on disk: written whole or not at all, checked when read, safe with several processes at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pipeline.config import InputError

if TYPE_CHECKING:
    import datasets

    Splits = dict[str, datasets.Dataset]
_META = "meta.json"


class Entry:
    """One set of splits and its facts (JSON), in a folder named by what they were made from.

    `directory` None: llama-lora-gaudi/data in $XDG_CACHE_HOME or ~/.cache.
    """

    def __init__(self, directory: str | None, key: str) -> None:
        if directory is None:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-lora-gaudi" / "data"
        else:
            base = Path(directory).expanduser()
        self.folder = base / key[:32]

    def read(self) -> tuple[Splits, dict[str, Any]] | None:
        """None if there is no entry or a damaged one (a file whose checksum isn't the recorded one)."""
        import datasets

        try:
            meta = json.loads((self.folder / _META).read_text())
            if meta.pop("checksums") != _checksums(self.folder):
                return None
            return {name: datasets.load_from_disk(str(self.folder / name)) for name in meta.pop("splits")}, meta
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def fill(self, splits: Splits, meta: dict[str, Any]) -> tuple[Splits, dict[str, Any]]:
        """Write aside, rename, read back. An entry that another process finished first stays. InputError if unwritable."""
        base = self.folder.parent
        try:
            base.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=base, prefix=".new-", ignore_cleanup_errors=True) as aside:
                new = Path(aside) / "new"
                with _no_progress_bars():
                    for name, dataset in splits.items():
                        dataset.save_to_disk(str(new / name), num_shards=1)
                record = {**meta, "splits": list(splits), "checksums": _checksums(new)}
                (new / _META).write_text(json.dumps(record))
                self._place(new, Path(aside) / "damaged")
        except OSError as error:
            raise InputError(
                f"data.cache_dir={base}: can't be written ({error}); set it to a writable folder"
            ) from error
        found = self.read()
        if found is None:
            raise InputError(
                f"data.cache_dir={base}: what was written there reads back otherwise; set it to another disk"
            )
        return found

    def _place(self, new: Path, damaged: Path) -> None:
        if self.folder.exists() and self.read() is None:
            with contextlib.suppress(FileNotFoundError):  # another process took it away
                self.folder.rename(damaged)
        try:
            new.rename(self.folder)
        except OSError:
            if self.read() is None:  # not because another process was first
                raise


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _META)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
