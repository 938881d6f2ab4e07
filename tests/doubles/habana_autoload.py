"""What `import torch` itself does on a Gaudi machine: load the bridge, except in lazy mode."""

import os


def autoload() -> None:
    if os.environ.get("PT_HPU_LAZY_MODE", "0") == "0" and os.environ.get("PT_HPU_AUTOLOAD", "1") == "1":
        import habana_frameworks.torch  # noqa: F401
