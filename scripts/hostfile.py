"""Hostfiles: a line `hostname slots=N` for each server; blank lines and # comments are allowed."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.pipeline.config import InputError

Hosts = dict[str, list[int]]  # host -> its slots, in order


def read_hostfile(path: str) -> Hosts:
    """Raises InputError with the line's number and text for anything else, for a host named twice and for zero slots."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--hostfile {path}: {getattr(error, 'strerror', None) or 'not text'}") from error
    hosts: Hosts = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}: {line.strip()!r}"
        if (match := re.fullmatch(r"([\w.\-]+)\s+slots=(\d+)", text)) is None:
            raise InputError(f"{where} is not `hostname slots=N`")
        if match[1] in hosts:
            raise InputError(f"{where}: the host {match[1]} is named twice")
        if int(match[2]) == 0:
            raise InputError(f"{where}: slots takes 1 or more; leave the line out instead")
        hosts[match[1]] = list(range(int(match[2])))
    if not hosts:
        raise InputError(f"--hostfile {path}: names no host")
    return hosts


def choose(hosts: Hosts, include: str | None, world_size: int | None, path: str) -> Hosts:
    """The slots that `include` (host1@host2:0,1) and `world_size` leave. Raises InputError for a host or slot that is not there."""
    if include is not None:
        chosen: dict[str, set[int]] = {}
        for part in include.split("@"):
            host, slots = _chosen(part, hosts, path)
            chosen.setdefault(host, set()).update(slots)
        hosts = {host: sorted(chosen[host]) for host in hosts if host in chosen}  # rank 0 is on the file's first
    available = sum(map(len, hosts.values()))
    if world_size is None or world_size == available:
        return hosts
    if world_size > available:
        raise InputError(f"--world_size {world_size}: {path} has {available} slots{' in --include' if include else ''}")
    left, kept = world_size, {}
    for host, own in hosts.items():
        if left > 0:
            kept[host] = own[:left]
            left -= len(kept[host])
    return kept


def _chosen(part: str, hosts: Hosts, path: str) -> tuple[str, list[int]]:
    host, colon, numbers = part.partition(":")
    if host not in hosts:
        raise InputError(f"--include {part}: {path} has no host {host!r}; there is {', '.join(hosts)}")
    if not colon:
        return host, hosts[host]
    if re.fullmatch(r"\d+(,\d+)*", numbers) is None:
        raise InputError(f"--include {part}: slots are numbers with commas between, as in {host}:0,1")
    slots = [int(number) for number in numbers.split(",")]
    for slot in slots:
        if slot not in hosts[host]:
            raise InputError(f"--include {part}: {host} has no slot {slot}, its slots are 0 to {len(hosts[host]) - 1}")
    return host, slots
