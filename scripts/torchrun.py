"""torch.distributed.run with the failed rank's own exit status (torchrun's is always 1)."""

import logging
import os
import sys

sys.path[:] = [
    path for path in sys.path if os.path.realpath(path or ".") != os.path.dirname(os.path.realpath(__file__))
]


def main() -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the line below says it in one
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        print(f"rank {rank} failed first, exit status {first.exitcode}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
