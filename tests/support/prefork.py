"""Run `dvc` and `ddpm` without their import time: forked from a process that has imported them.

A folder for PATH has small scripts `dvc` and `ddpm`. A script sends its arguments, folder,
environment and open files to a server, which forks, and exits with the status of the forked
process. Signals to the script do not reach that process: tests that kill a program must start it
directly.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PROGRAMS = {"dvc": "dvc.cli", "ddpm": "ddpm_core.cli"}
IMPORTED = (
    "dvc.commands.repro",
    "dvc.commands.data_sync",
    "dvc.repo.experiments.run",
    "dvc_render",
    "ddpm_core.data.prepare",
    "ddpm_core.training.launch",
    "ddpm_core.sampling.run",
    "ddpm_core.evaluation.evaluate",
    "matplotlib.pyplot",
    "scipy.stats",
    "torch_fidelity.metric_fid",
)
LONGEST = 2**17  # bytes of the largest request

SCRIPT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
request = [{module!r}, sys.argv, os.getcwd(), dict(os.environ)]
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
status = server.recv(16)
server.recv(1)  # until the process is gone
sys.exit(int(status or b"1"))
"""


class Prefork:
    """The server and the folder of scripts."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        path = folder / "server"
        self.folder = folder / "bin"
        self.folder.mkdir()
        for name, module in PROGRAMS.items():
            script = self.folder / name
            script.write_text(SCRIPT.format(python=sys.executable, path=str(path), module=module))
            script.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, __file__, str(listener.fileno())]
        self._server = subprocess.Popen(
            command, env=environment, pass_fds=[listener.fileno()], start_new_session=True
        )
        listener.close()

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def serve(listener: socket.socket) -> None:
    """Fork a process for each request, forever."""
    for name in (*PROGRAMS.values(), *IMPORTED):
        importlib.import_module(name)
    # Memory that the garbage collector does not touch stays shared after a fork.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(connection)
        connection.close()


def become(connection: socket.socket) -> None:
    """Run the requested program in this process, and exit."""
    data, files, *_ = socket.recv_fds(connection, LONGEST, 3)
    module, sys.argv, folder, environment = json.loads(data)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    try:
        status = importlib.import_module(module).main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        connection.send(str(status).encode())
        os._exit(status)  # normal teardown would take longer than the work


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
