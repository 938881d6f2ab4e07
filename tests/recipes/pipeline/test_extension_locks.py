"""Locks on torch's extensions, held by torch's own FileBaton."""

import os
import time

import pytest
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

from recipes.pipeline import extension_locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Path of the lock of an extension, in a folder made by torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    made = _get_build_directory("deepspeed_shm_comm", verbose=False)
    assert made.startswith(str(extension_locks.folder()))
    return extension_locks.folder() / os.path.relpath(made, extension_locks.folder()) / "lock"


def aged(lock, seconds):
    os.utime(lock, (time.time() - seconds,) * 2)


def test_a_lock_of_a_killed_run_is_removed_and_said(lock, capsys):
    lock.touch()
    aged(lock, 3600)
    extension_locks.clear()
    assert not lock.exists()
    assert capsys.readouterr().err == f"warning       {lock}: left by a run that was killed; removed\n"
    FileBaton(str(lock)).wait()  # ends


def test_a_lock_that_torch_holds_stays(lock, capsys):
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    aged(lock, 3600)
    extension_locks.clear()
    assert lock.exists() and capsys.readouterr().err == ""
    baton.release()


def test_a_young_lock_stays_and_is_named(lock, capsys):
    """It may be another host's."""
    lock.touch()
    extension_locks.clear()
    assert lock.exists()
    assert "DeepSpeed waits until it is gone; remove it" in capsys.readouterr().err


def test_nothing_was_ever_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    extension_locks.clear()
    assert capsys.readouterr().err == ""
