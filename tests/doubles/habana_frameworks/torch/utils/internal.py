"""Lazy or not: read once, at the first call; unset means eager since Gaudi 1.21."""

import os
from functools import lru_cache


@lru_cache
def is_lazy():
    return os.environ.get("PT_HPU_LAZY_MODE", "0") != "0"
