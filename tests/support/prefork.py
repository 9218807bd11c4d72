"""Programs of the command line, forked from a process that has imported them already.

A folder for PATH with small scripts `dvc` and `ddpm`: each hands its arguments, folder, environment
and open files to a server, which forks; it ends when that process ends, with its status. These are
real processes that pay no import. A signal to the script does not reach them: what is to be killed
is started as the program that it is.
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
LONGEST = 2**17  # bytes of a request

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
    """The server, and the folder of scripts."""

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
    """Fork for each request, for ever."""
    for name in (*PROGRAMS.values(), *IMPORTED):
        importlib.import_module(name)
    # What a collection does not touch, a forked process shares.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(connection)
        connection.close()


def become(connection: socket.socket) -> None:
    """Be the program that is asked for, to its end."""
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
        os._exit(status)  # to take apart all that was imported would cost more than the work


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
