"""mark_step: in lazy mode it cuts the graph and runs pending closures; in eager mode it does nothing."""

import habana_double
from habana_frameworks.torch.utils.internal import is_lazy

import torch

_closures: list = []


def add_step_closure(closure, args=()):
    _closures.append(lambda: closure(*args))


def mark_step(device_str="", sync=False):
    if not is_lazy():
        habana_double.count("mark_step_in_eager")
        return
    habana_double.count("mark_step")
    if habana_double.DEVICE == "lazy":
        torch._lazy.mark_step(wait=sync)
    while _closures:
        _closures.pop(0)()


def iter_mark_step(device_str=""):
    mark_step(device_str)


def _mark_step_if_lazy(device_str=""):
    if is_lazy():
        mark_step(device_str)
