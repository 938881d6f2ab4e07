"""torch.distributed.run with the failed rank's own exit status (torchrun's is always 1), said in one line."""

import importlib
import logging
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.processes import PATIENCE, describe, status_of, without_the_bridge  # noqa: E402


def main() -> int:
    without_the_bridge(lambda: importlib.import_module("torch"))
    from torch.distributed.elastic.multiprocessing import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    close = PContext.close  # its own patience is 30 s, and no option reaches every call
    PContext.close = lambda self, death_sig=None, timeout=PATIENCE: close(self, death_sig, min(timeout, PATIENCE))
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        print(f"gaudi_spawn: {describe(f'rank {rank}', first.exitcode)}", file=sys.stderr)
        return status_of(first.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
