"""Program of test_distributed_runner.py: what optimum-habana's DistributedRunner and, behind it, DeepSpeed's runner would start.

python runner_commands.py CASES.json SCRIPT ARGUMENT...: CASES is {case: arguments of DistributedRunner, "server": sockets
and cores of each for the `lscpu` on the PATH}. Prints JSON {case: {"command": argv, "started": argv, "variables": {...}}}. Nothing is
started: the last process creation is recorded instead.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace


def main(cases: str, *script: str) -> None:
    from deepspeed.launcher import runner as deepspeed_runner
    from optimum.habana.distributed import DistributedRunner

    found = {}
    for name, options in json.loads(Path(cases).read_text(encoding="utf-8")).items():
        os.environ["SOCKETS"], os.environ["CORES"] = map(str, options.pop("server", (1, 1)))
        runner = DistributedRunner([shlex.join(script)], master_port=29511, **options)
        words = [*shlex.split(runner._interpreter), *script]
        case = {"command": words, "variables": {key: str(value) for key, value in runner._model_env_vars.items()}}
        if words[0] == "deepspeed":
            case["started"] = recorded(deepspeed_runner, words[1:])
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
