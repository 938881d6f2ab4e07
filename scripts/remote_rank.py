"""Run a script with arguments and variables that came in one shell-proof word (scripts/gaudi_spawn.py makes it)."""

import base64
import json
import os
import runpy
import sys


def main() -> None:
    parcel = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    os.environ.update(parcel["environment"])
    sys.argv = parcel["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
