"""Program of test_distributed_runner.py: what optimum-habana's DistributedRunner and, behind it, DeepSpeed's runner would start.

python runner_commands.py SCRIPT HOSTFILE: prints JSON {case: {"interpreter": ..., "started": argv, "variables": {...}}}. Nothing
is started: the last process creation is recorded instead.
"""

import json
import os
import shlex
import sys
from types import SimpleNamespace


def main(script: str, hostfile: str) -> None:
    from deepspeed.launcher import runner as deepspeed_runner
    from optimum.habana.distributed import DistributedRunner

    cases = {
        "one card": {},
        "one card, deepspeed": {"use_deepspeed": True},
        "eight cards": {"world_size": 8},
        "eight cards, deepspeed": {"world_size": 8, "use_deepspeed": True},
        "two cards, mpi": {"world_size": 2, "use_mpi": True},
        "two hosts, deepspeed": {"hostfile": hostfile, "use_deepspeed": True},
    }
    found = {}
    for name, options in cases.items():
        runner = DistributedRunner([script], master_port=29511, **options)
        words = shlex.split(runner._interpreter)
        case = {"interpreter": words, "variables": {key: str(value) for key, value in runner._model_env_vars.items()}}
        if words[0] == "deepspeed":
            case["started"] = recorded(deepspeed_runner, [*words[1:], script, "a=1"])
        found[name] = case
    print(json.dumps(found))


def recorded(runner, arguments: list[str]) -> list[str]:
    started = []

    def popen(command, env=None, **options):
        started.append(command)
        return SimpleNamespace(wait=lambda: 0, returncode=0, poll=lambda: 0, terminate=lambda: None)

    usual = runner.subprocess
    names = {name: getattr(usual, name) for name in dir(usual) if not name.startswith("__")}
    runner.subprocess = SimpleNamespace(**{**names, "Popen": popen, "check_call": lambda *a, **k: 0})
    try:
        runner.main(arguments)
    except SystemExit:
        pass
    finally:
        runner.subprocess = usual
    return started[-1]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "hpu"
    main(*sys.argv[1:])
