"""Where Alpaca records come from: a file, a folder of files or a hub data set, checked row by row.

Files are read here and not by the datasets library, so that a message can name the file and the row.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recipes.pipeline.config import ColumnsConfig, InputError

ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".json.gz", ".jsonl.gz", ".csv.gz")
_HELD_OUT_NAME = re.compile(r"(test|val|valid|validation|eval|dev)([-_.]|$)", re.IGNORECASE)

Row = tuple[str, Any]  # ("row 3", the record as it stands in the file)


@dataclass(frozen=True)
class Source:
    """Records that a config names. `files` is empty for a hub data set."""

    key: str  # the option that names it, for messages
    name: str
    files: tuple[Path, ...] = ()
    split: str | None = None

    def sha256(self) -> str:
        """Of the content, whatever the files are called. A hub data set is read for it."""
        digest = hashlib.sha256()
        hub = (json.dumps(row, default=str).encode() for row in (() if self.files else self._hub))
        for part in map(_bytes, self.files) if self.files else hub:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def records(self, columns: ColumnsConfig) -> list[dict[str, str]]:
        """All records as {instruction, input, output}. Raises InputError for the first bad one, with the number of bad ones."""
        records: list[dict[str, str]] = []
        if not self.files:
            rows = [(f"row {n}", record) for n, record in enumerate(self._hub, 1)]
            return _checked(rows, f"{self.name}, split {self.split}", columns)
        for path in self.files:
            records += _checked(list(_read(path)), str(path), columns)
        return records

    @cached_property
    def _hub(self) -> list[dict[str, Any]]:
        return _hub_rows(self.name, self.split or "train", self.key)


def locate(name: str, key: str, split: str | None = None) -> Source:
    """A path that exists is local and stays so; OWNER/NAME that is no path is a hub data set. InputError for neither."""
    path = Path(name).expanduser()
    if path.is_file():
        _ending(path)
        return Source(key, name, (path,))
    if path.is_dir():
        return Source(key, name, _files_in(path, key))
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(ENDINGS) and not path.parent.exists():
        return Source(key, name, split=split)
    raise InputError(f"{key}={name}: no such file or folder{near(path)}")


def rows(path: Path) -> list[Row]:
    """What a file holds, row by row and unchecked: objects or, in JSON, texts. Raises InputError for a damaged file."""
    return list(_read(path))


def near(path: Path) -> str:
    """Names like the one that was not found, for a message."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    siblings = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    found = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    return (
        f"; near it: {', '.join(str(folder / entry) for entry in found)}"
        if found
        else f"; looked in {folder.resolve()}"
    )


def _ending(path: Path) -> str:
    ending = next((e for e in sorted(ENDINGS, key=len, reverse=True) if path.name.lower().endswith(e)), None)
    if ending is None:
        raise InputError(f"{path}: unknown ending; accepted: {' '.join(ENDINGS)}")
    return ending.removesuffix(".gz")


def _files_in(folder: Path, key: str) -> tuple[Path, ...]:
    entries = sorted(
        p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).as_posix().startswith(".")
    )
    files = tuple(p for p in entries if p.name.lower().endswith(ENDINGS) and not p.name.lower().endswith(".txt"))
    if not files:
        raise InputError(f"{key}={folder}: no data file in this folder; accepted endings: {' '.join(ENDINGS)}")
    held_out = [p.name for p in files if _HELD_OUT_NAME.match(p.name)]
    if held_out and len(held_out) < len(files):
        raise InputError(
            f"{key}={folder}: {held_out[0]} looks like a held-out part among training files; "
            "name the training file in data.path and the other in data.eval_path"
        )
    return files


def _read(path: Path) -> Iterator[Row]:
    ending = _ending(path)
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    if ending == ".parquet":
        yield from _parquet(path)
        return
    text = _text(path)
    if ending == ".csv":
        yield from _csv(path, text)
    elif ending == ".txt" and text.lstrip()[:1] not in ("[", "{"):
        raise InputError(f"{path}: a .txt file must hold JSON; accepted endings: {' '.join(ENDINGS)}")
    else:
        yield from _json(path, text)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror})") from error


def _text(path: Path) -> str:
    content = _bytes(path)
    if path.name.lower().endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip file ({error})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        bad = content[error.start]
        raise InputError(
            f"{path} line {line}: byte 0x{bad:02x} at offset {error.start} is no UTF-8; save the file as UTF-8"
        ) from error
    if not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text


def _json(path: Path, text: str) -> Iterator[Row]:
    """A list of objects, an object that holds one such list, or an object a line, whichever the ending says."""
    if text.lstrip()[0] != "[":
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        if path.name.lower().removesuffix(".gz").endswith(".jsonl") or (_is_json(lines[0][1]) and len(lines) > 1):
            for n, line in lines:
                yield f"line {n}", _parse(path, line, n)
            return
    whole = _parse(path, text, 1)
    if isinstance(whole, dict):
        lists = [v for v in whole.values() if isinstance(v, list) and v and all(isinstance(item, dict) for item in v)]
        whole = lists[0] if len(lists) == 1 else [whole]
    if not isinstance(whole, list):
        raise InputError(f"{path}: holds a {_kind(whole)} where a list of records should be")
    for n, record in enumerate(whole, 1):
        yield f"record {n}", record


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parse(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} line {first_line + error.lineno - 1} column {error.colno}: broken JSON ({error.msg})"
        ) from error
    except RecursionError as error:
        raise InputError(f"{path} line {first_line}: JSON nested too deeply") from error


def _csv(path: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names, line = reader.fieldnames, reader.line_num + 1
        if names is None or len(set(names)) < len(names):
            raise InputError(f"{path} line 1: the header names a column twice or none at all")
        for record in reader:
            if None in record:
                raise InputError(f"{path} line {line}: more cells than the header names; quote cells that hold a comma")
            yield f"line {line}", {name: cell for name, cell in record.items() if cell is not None}
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: broken CSV ({error})") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged Parquet file ({str(error).splitlines()[0]})") from error
    for n, record in enumerate(table.to_pylist(), 1):
        yield f"row {n}", record


def _checked(rows: list[Row], name: str, columns: ColumnsConfig) -> list[dict[str, str]]:
    if not rows:
        raise InputError(f"{name}: no record in it")
    found = list(dict.fromkeys(str(column) for _, row in rows if isinstance(row, Mapping) for column in row))
    wanted = [columns.instruction, columns.output]
    if columns.input not in (None, "input"):
        wanted.insert(1, columns.input)  # named on purpose, so it must be there
    if missing := [column for column in wanted if found and column not in found]:
        raise InputError(
            f"{name}: no column {', '.join(missing)}; found: {', '.join(found)}; wanted: {', '.join(wanted)}; "
            "map them with data.columns.instruction=NAME, data.columns.input=NAME, data.columns.output=NAME"
        )
    faults = [(where, fault) for where, row in rows if (fault := _fault(row, columns))]
    if faults:
        where, fault = faults[0]
        share = "no valid record" if len(faults) == len(rows) else f"{len(faults)} of {len(rows)} records are bad"
        raise InputError(f"{name} {where}: {fault}; {share}; mend or remove them")
    names = {"instruction": columns.instruction, "input": columns.input, "output": columns.output}
    return [{key: row.get(column) or "" for key, column in names.items()} for _, row in rows]


def _fault(row: Any, columns: ColumnsConfig) -> str | None:
    if not isinstance(row, Mapping):
        return f"a {_kind(row)} where an object with {columns.instruction} and {columns.output} should be"
    for column in (columns.instruction, columns.input, columns.output):
        if column is None or (column == columns.input and row.get(column) is None):
            continue  # a record without an input is a record with an empty one
        if column not in row:
            return f"field {column!r} is missing"
        if not isinstance(row[column], str):
            return f"field {column!r} is a {_kind(row[column])} where text should be"
        try:
            row[column].encode()
        except UnicodeEncodeError as error:
            return f"field {column!r} holds half a surrogate pair at character {error.start}, which is no text"
    return None


def _kind(value: Any) -> str:
    names = {dict: "dict", list: "list", bool: "boolean", int: "number", float: "number", str: "text"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _hub_rows(name: str, split: str, key: str) -> list[dict[str, Any]]:
    import datasets

    with _hub_reachable(name):
        try:
            found = datasets.load_dataset(name)
        except Exception as error:  # the hub client's own kinds are many: no such set, gated, offline, damaged
            raise InputError(
                f"{key}={name}: no such file or folder here, and not readable from the hub "
                f"({str(error).splitlines()[0]}); give a local file, or run once where the hub is reachable"
            ) from error
    if split not in found:
        raise InputError(f"{key}={name}: no split {split!r}; present: {', '.join(found)}")
    return found[split].to_list()


@contextmanager
def _hub_reachable(name: str) -> Iterator[None]:
    """Ask once, shortly; when there is no answer use the copy on disk at once instead of trying for half a minute."""
    import datasets
    import huggingface_hub

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    try:
        if not any(before):
            huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except OSError as error:
        # an answer of the hub (no such set, no access) is for load_dataset to tell
        if getattr(error, "response", None) is None:
            datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
