"""The tasks of a node over Flower, one for each message: claimed with a secret, and each given to a process of its own.

A SuperNode has an API on a port of 127.0.0.1, over which the process of a message gets the message and the node's state, and
gives back the reply. Where the SuperNode starts these processes itself (`--isolation subprocess`), whoever has an account on the
machine may claim a task, and reads the tokens of others on command lines. So the node starts them here: a task is claimed with a
secret that is made anew whenever the node starts, its token is in a file for its owner only, and the API has TLS, so that whoever
listens at the port in the SuperNode's place gets no process.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import secrets
import shutil
import signal
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fedtail.deployment.keys import write_secret

FOLDER = "tasks"                        # in the folder of Flower's files, in the node's folder
SECRET = "secret"
PORTS = "ports.toml"                    # in the folder of Flower's files: where the node listens, at 127.0.0.1
KIND = "flwr-clientapp"                 # the kind of task that a node has, and the command that processes it
PATH, METHOD = "/v1/runtime/acquire-task", "/flwr.proto.Runtime/AcquireTask"
REFUSED = (401, 403)
POLL, PATIENCE = 0.1, 30.0              # seconds between two questions for a task, and for an answer to one
ENDS = 2.0                              # seconds that a process is given to end
VERSIONS = "Install a version of Flower that fedtail[flower] names."


class NodeTasks:
    """Claims the tasks of the SuperNode that listens at 127.0.0.1 and `port`, and starts a process for each.

    `home` is the folder of the node's files for Flower, with the certificate and key of that port in `tls`.
    """

    def __init__(self, home: Path, port: int, environment: Mapping[str, str], log: Callable[[str], None] = lambda text: None):
        """Make the secret and the folder of tokens anew; nothing is started. `environment` is that of the processes."""
        self.folder, self.port, self.environment, self.log = home / FOLDER, port, dict(environment), log
        self._tls = home / "tls"
        self._context = ssl.create_default_context(cafile=str(self._tls / "ca.crt"))
        self._line: http.client.HTTPSConnection | None = None
        self._before = 0                                       # the status of the last answer: it is told once
        self._processes: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        write_secret(self.folder / SECRET, secrets.token_bytes(32))

    @property
    def options(self) -> list[str]:
        """The options with which a SuperNode leaves its processes to whoever knows the secret, and has TLS at its port."""
        return ["--host", "127.0.0.1", "--port", str(self.port), "--isolation", "process",
                "--superexec-auth-secret-file", str(self.folder / SECRET), "--ssl-ca-certfile", str(self._tls / "ca.crt"),
                "--ssl-certfile", str(self._tls / "server.pem"), "--ssl-keyfile", str(self._tls / "server.key")]

    async def run(self) -> None:
        """Wait until the SuperNode answers, and start a process for each task, until this is cancelled; then end them all.

        Raises RuntimeError where tasks are given to whoever asks, or not to whoever has the secret.
        """
        try:
            while not (status := (await asyncio.to_thread(self._call, False))[0]):
                await asyncio.sleep(POLL)
            if status not in REFUSED:
                raise RuntimeError(f"Flower's SuperNode answers {status} where a task of this node is claimed without secret, "
                                   f"and must refuse: every account of this machine could claim tasks. {VERSIONS}")
            while True:
                if token := await asyncio.to_thread(self.claim):
                    await self._start(token)
                await asyncio.sleep(POLL)
        finally:
            await self._end()

    def claim(self) -> str:
        """Claim a task and return its token; "" where there is none, or no answer. RuntimeError where the secret is refused."""
        from flwr.proto.runtime_pb2 import AcquireTaskResponse

        status, said = self._call(True)
        if status in REFUSED:
            raise RuntimeError(f"Flower's SuperNode refuses the secret of this node ({status}), which it was given. {VERSIONS}")
        if status not in (0, 200, self._before):
            self.log(f"Flower's SuperNode answers {status} where a task is claimed; it is tried again")
        self._before = status
        return str(AcquireTaskResponse.FromString(said).token) if status == 200 else ""

    def _call(self, with_secret: bool) -> tuple[int, bytes]:
        """The pair (status, body) of the answer to a call for a task, (0, b"") without one; without the secret none is named."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret

        asked = AcquireTaskRequest(supported_task_types=[KIND] if with_secret else [])
        headers = {"content-type": "application/protobuf"}
        if with_secret:
            key = derive_auth_secret((self.folder / SECRET).read_bytes())
            headers |= create_superexec_auth_metadata(auth_secret=key, method=METHOD, request=asked)
        if self._line is None:
            self._line = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=self._context)
        try:
            self._line.request("POST", PATH, asked.SerializeToString(), headers)
            answer = self._line.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            self._line.close()                             # it is opened again by the next call
            return 0, b""

    async def _start(self, token: str) -> None:
        """Start the process of the task with this token, which reads it from a file."""
        file = self.folder / f"token-{secrets.token_hex(8)}"
        write_secret(file, token.encode())
        process = await asyncio.create_subprocess_exec(
            KIND, "--runtime-api-address", f"127.0.0.1:{self.port}", "--token-file", str(file), "--root-certificates",
            str(self._tls / "ca.crt"), "--parent-pid", str(os.getpid()), env=self.environment, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True)
        self._processes[process] = asyncio.create_task(self._forget(process, file))

    async def _forget(self, process: asyncio.subprocess.Process, file: Path) -> None:
        """Wait for the end of a process, and remove its token."""
        await process.wait()
        file.unlink(missing_ok=True)
        self._processes.pop(process, None)

    async def _end(self) -> None:
        """End the processes that still run, by SIGKILL those that have not ended after a while."""
        waiting = list(self._processes.values())
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in list(self._processes):
                with suppress(ProcessLookupError):
                    process.send_signal(how)
            if waiting:
                await asyncio.wait(waiting, timeout=ENDS)
        if self._line is not None:
            self._line.close()
