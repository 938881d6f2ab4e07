"""HPU graphs: a module's forward is captured once for each set of shapes and constants, and replayed afterwards.

Here Python runs at each replay too, to compute the result; the ops must then be those of the capture, mark_step is not heard,
and the results land in the memory of the first call's results, as a replay's do.
"""

import functools

import habana_double

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_capturing = {"now": False}
HOST = ("aten::_local_scalar_dense", "aten::nonzero")  # these wait for data on the host


class _Ops(TorchDispatchMode):
    """The ops of one pass, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Waits:
    """The same where torch's lazy engine runs: it shows what it had to fall back for, and none of it may wait for data."""

    names = ()

    def __enter__(self):
        self.before = self.count()
        return self

    def __exit__(self, *error):
        if self.count() > self.before:
            raise RuntimeError("cpu fallback is not supported during hpu graph capturing")

    @staticmethod
    def count():
        import torch._lazy.metrics as counters

        return sum(counters.counter_value(name) for name in HOST if name in counters.counter_names())


def is_current_stream_capturing():
    return _capturing["now"]


def wrap_in_hpu_graph(module, asynchronous=False, disable_tensor_cache=False, dry_run=False, max_graphs=None):
    plain, graphs = module.forward, {}

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        bypass = kwargs.pop("bypass_hpu_graphs", False)
        for name in ("warmup_mode", "cache_tensors_list"):
            kwargs.pop(name, None)
        key = _key((args, kwargs))
        if bypass or (key not in graphs and max_graphs is not None and len(graphs) >= max_graphs):
            return plain(*args, **kwargs)
        if torch.is_grad_enabled():
            raise RuntimeError("HPU graphs detach gradients")
        if key not in graphs:
            graphs[key] = _record(plain, args, kwargs)
            habana_double.count("graph_capture")
            return graphs[key][1]
        return _replay(graphs[key], plain, args, kwargs)

    module.forward = forward
    module.clear_cache = graphs.clear
    module.clear_inputs = lambda: None
    return module


def _record(plain, args, kwargs):
    recorder = _Waits() if habana_double.DEVICE == "lazy" else _Ops()
    _capturing["now"] = True
    try:
        with recorder:
            return recorder.names, plain(*args, **kwargs)
    finally:
        _capturing["now"] = False


def _replay(graph, plain, args, kwargs):
    heard = habana_double.calls.copy()
    ops, results = _record(plain, args, kwargs)
    habana_double.calls.clear()
    habana_double.calls.update(heard)
    habana_double.count("graph_replay")
    if ops != graph[0]:
        raise RuntimeError("a replay would run other ops than were captured: Python state or data decided something")
    flat, form = tree_flatten(graph[1])
    for kept, new in zip(flat, tree_flatten(results)[0], strict=True):
        if isinstance(kept, torch.Tensor):
            kept.copy_(new)
    return tree_unflatten(flat, form)


def _key(arguments):
    def part(value):
        if isinstance(value, torch.Tensor):
            return "tensor", tuple(value.shape), tuple(value.stride()), value.dtype
        return "constant", type(value).__name__, value if isinstance(value, (int, float, str, bool)) else None

    return str(tree_map(part, arguments))
