"""A stand-in for the interpreter: warm_python.py SOCKET PYTHON EXECUTABLE ARGUMENT... has warm_process.py run a script or -c TEXT.

Signals go on to it, its end is this process's. Anything else (-m, the double of Gaudi's software) is left to PYTHON itself.
"""

import json
import os
import signal
import socket
import sys

path, python, executable, *arguments = sys.argv[1:]
command = arguments[arguments[:1] == ["-u"] :]
if not command or not (command[0] == "-c" or command[0].endswith(".py")) or "doubles" in os.getenv("PYTHONPATH", ""):
    os.execv(python, [python, *arguments])

ENDING = [
    number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
]
request = {
    "command": command, "cwd": os.getcwd(), "environment": dict(os.environ), "executable": executable,
    "unbuffered": arguments[:1] == ["-u"], "session": os.getsid(0) == os.getpid(),
}  # fmt: skip
signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
asked = socket.socket(socket.AF_UNIX)
asked.connect(path)
socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
answers = asked.makefile()
child = int(answers.readline())
for number in ENDING:
    signal.signal(number, lambda number, frame: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
