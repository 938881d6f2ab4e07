"""Graph breaks."""

import habana_double
from habana_frameworks.torch import hpu  # noqa: F401
from habana_frameworks.torch.core import step_closure
from habana_frameworks.torch.core.step_closure import add_step_closure, iter_mark_step, mark_step
from habana_frameworks.torch.utils.internal import is_lazy

habana_double.note("import habana_frameworks.torch.core", lazy=is_lazy())
__all__ = ["add_step_closure", "iter_mark_step", "mark_step", "step_closure"]
