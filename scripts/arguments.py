"""What the scripts' command lines share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from recipes.pipeline.config import InputError


class OneLineParser(argparse.ArgumentParser):
    """A wrong option is one line like every other wrong input, without the usage. Raises InputError."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help shows the options")
