"""A Hub on loopback that the real clients of huggingface_hub, transformers, timm and datasets push to and load from.

    with HubServer(token="hf_secret") as hub:                   # the token of the user "user"
        hub.run("from huggingface_hub import HfApi; HfApi().create_repo('user/model', private=True)")
        hub.repos["user/model"].commits[-1].files               # {path: bytes}; commits[0] is the Hub's own, as there
        hub.repos["datasets/user/kg"].files("v1.0")             # by branch, tag or commit; .branches, .tags, .private

Clients read their settings when they are imported, so they run in processes of their own: `hub.run(code, *arguments,
timeout=540, **environment)` returns what the code prints, and fails with what it wrote to stderr;
`hub.environment(**changes)` is for any other command. Changes are variables, None removes one: `HF_TOKEN=None` is a
client without a token, `HF_HUB_OFFLINE="1"` one without a network, and `HF_HUB_DISABLE_XET=None` one with Xet, for
which the Hub must be `HubServer(lfs=False)`, since there is no Xet storage here. Processes share the cache
`hub.folder / "home"`. `hub.add_user("other", "hf_other", role="read")` is one who cannot write;
`hub.add_repo("user/model", {"config.json": b"{}"}, type="model", private=False)` needs no client.

Faults happen to the next `times` requests (`math.inf`: to all) of a step, or whose path contains `what`:

    hub.fail("commit", status=503)              # 401 and 403 look like the Hub's own
    hub.fail("commit", 504, when="after")       # an error is told although the commit was recorded
    hub.cut("commit", when="after")             # recorded, then the connection is closed without an answer
    hub.cut("lfs-download", when="during")      # closed in the middle of the answer; when="before": nothing was done
    hub.stall("commit", when="after")           # recorded, then silence; when="during": in the middle of the answer
    hub.garble("info", "<html>", when="before") # answered with status 200 and this text
    hub.delay("config.json", seconds=2, method="GET")
    hub.faults.clear()                          # what has not happened yet

Steps: registry whoami validate-yaml create delete settings info refs tree paths-info commits preupload lfs-batch
lfs-upload lfs-verify commit tag branch resolve lfs-download; "unknown" is what is not spoken here. `hub.log` lists the
requests: method, path, step, status (None if the connection was cut) and whether a token was sent, never the token.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import warm
from hub_api import BAD_TOKEN, ROUTES, STEPS, STORAGE, Answer, Call, HubApi, error_answer
from hub_store import HubError


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    step: str
    authorized: bool
    status: int | None


@dataclass
class Fault:
    kind: str
    what: str
    method: str | None
    times: float
    when: str = "before"
    status: int = 0
    message: str = ""
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


class HubServer(HubApi):
    """The Hub as a context manager: on two free ports of 127.0.0.1 while inside."""

    def __init__(self, token: str = "hf_loopback", user: str = "user", *, lfs: bool = True):
        super().__init__(lfs=lfs)
        self.token = token
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self._closing = threading.Event()
        self.add_user(user, token)

    def __enter__(self) -> HubServer:
        self._temporary = tempfile.TemporaryDirectory(prefix="hub", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        # Large files have an origin of their own, as on the Hub, to which no client may send its token.
        self._servers = [Server(self, large=large) for large in (False, True)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._temporary.cleanup()

    def environment(self, **changes: str | None) -> dict[str, str]:
        """The variables of a client's process: this Hub, its token, an empty cache, and nothing else of the kind."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not re.match("HF_|HUGGING|TRANSFORMERS_|XDG_CACHE|.*_proxy$", name, re.IGNORECASE)
        }
        settings: dict[str, str | None] = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.folder / "home"),
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "OMP_NUM_THREADS": "1",
        }
        return {name: value for name, value in (kept | settings | changes).items() if value is not None}

    def run(self, code: str, *arguments: object, timeout: float = 540, **environment: str | None) -> str:
        """What Python code prints that runs in a client's process, with `hub.folder` as its working directory."""
        env = self.environment(**environment)
        done = warm.run("-c", code, *arguments, cwd=self.folder, env=env, timeout=timeout, bare=True)
        assert done.returncode == 0, f"the client ended with {done.returncode}:\n{done.stderr[-5000:]}"
        return done.stdout

    def fail(
        self,
        what: str,
        status: int = 500,
        times: float = 1,
        *,
        when: str = "before",
        method: str | None = None,
        message: str | None = None,
        **headers: str,
    ) -> None:
        """Answers with an error, before or after the request has had its effect."""
        usual = {401: BAD_TOKEN, 403: "Forbidden: you must use a write token to upload to a repository."}
        message = message or usual.get(status, "Internal Error - We're working hard to fix this as soon as possible!")
        self._arm(Fault("fail", what, method, times, when, status, message, headers=headers), "before", "after")

    def cut(self, what: str, when: str = "after", times: float = 1, *, method: str | None = None) -> None:
        """Closes the connection: before the request has an effect, after it, or during the answer."""
        self._arm(Fault("cut", what, method, times, when), "before", "during", "after")

    def stall(self, what: str, when: str = "before", times: float = 1, *, method: str | None = None) -> None:
        """Keeps the connection open and sends nothing more."""
        self._arm(Fault("stall", what, method, times, when), "before", "during", "after")

    def garble(
        self, what: str, text: str, when: str = "before", times: float = 1, *, method: str | None = None
    ) -> None:
        """Answers with success and this text, before or after the request has had its effect."""
        self._arm(Fault("garble", what, method, times, when, 200, text), "before", "after")

    def delay(self, what: str, seconds: float, times: float = 1, *, method: str | None = None) -> None:
        """Waits before it takes up a request."""
        self._arm(Fault("delay", what, method, times, seconds=seconds), "before")

    def _arm(self, fault: Fault, *moments: str) -> None:
        if fault.what not in STEPS and not re.search("[/.]", fault.what):
            raise ValueError(
                f"{fault.what!r} is neither a step ({', '.join(STEPS)}) nor a part of a path, with / or ."
            )
        if fault.when not in moments:
            raise ValueError(f"when is {fault.when!r}. Expected one of {', '.join(moments)}.")
        self.faults.append(fault)

    # What the connections below ask for.

    def take_faults(self, step: str, method: str, path: str) -> tuple[float, Fault | None]:
        """The delay that happens to this request, and the failure or cut: of several, the one asked for first."""
        taken: dict[bool, Fault] = {}
        with self._lock:
            for fault in list(self.faults):
                here = fault.what == step or (fault.what in path and fault.what not in STEPS)
                if here and fault.method in (None, method) and (fault.kind == "delay") not in taken:
                    taken[fault.kind == "delay"] = fault
                    fault.times -= 1
                    if fault.times < 1:
                        self.faults.remove(fault)
        return taken[True].seconds if True in taken else 0.0, taken.get(False)

    def wait(self, seconds: float) -> None:
        self._closing.wait(seconds)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: HubServer, *, large: bool):
        self.hub, self.large = hub, large
        super().__init__(("127.0.0.1", 0), Connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that left is no error
            super().handle_error(request, client_address)


class Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def serve(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        step, parts = self.route(url.path)
        authorization = self.headers.get("Authorization")
        seconds, fault = hub.take_faults(step, self.command, unquote(url.path))
        hub.wait(seconds)
        cut = fault.when if fault and fault.kind in ("cut", "stall") else None
        fail = fault if fault and fault.kind in ("fail", "garble") else None

        def note(status: int | None) -> None:
            hub.log.append(Request(self.command, self.path, step, authorization is not None, status))

        body = (
            self.read_body()
        )  # also before a cut: what is left unread would make the client's error a matter of luck
        if cut == "before":
            note(None)
            self.hang_up(fault)
            return
        try:
            if fail and fail.when == "before":
                raise HubError(fail.status, fail.message, **fail.headers)
            user = hub.user_of(authorization) if authorization and not self.server.large else None
            if step == "unknown":
                raise HubError(404, f"{self.command} {url.path} is not spoken here", "RepoNotFound")
            answer = hub.answer(Call(step, self.command, user, parts, parse_qs(url.query), self.headers, body))
            if fail:
                raise HubError(fail.status, fail.message, **fail.headers)
        except HubError as error:
            answer = error_answer(error) if error.status >= 400 else Answer(error.message.encode())
        except (KeyError, ValueError) as error:
            answer = error_answer(HubError(400, f"the request cannot be understood: {error!r}"))
        note(None if cut else answer.status)
        whole = self.command == "HEAD" or not answer.body  # there is no middle
        if cut == "after" or (cut and whole):
            self.hang_up(fault)
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if not whole:
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        if cut:
            self.hang_up(fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815 (the names http.server calls)

    def route(self, path: str) -> tuple[str, dict[str, str]]:
        for step, methods, pattern in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods.split("|") and (pattern == STORAGE) == self.server.large:
                return step, {name: value and unquote(value) for name, value in found.groupdict().items()}
        return "unknown", {}

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0] or b"-1", 16):
            chunks.append(self.read(size + 2)[:-2])
        self.rfile.readline()
        return b"".join(chunks)

    def read(self, size: int) -> bytes:
        content = self.rfile.read(size) if size >= 0 else b""
        if len(content) != size:
            raise ConnectionError("the client left in the middle of its request")
        return content

    def hang_up(self, fault: Fault | None) -> None:
        self.close_connection = True
        if fault and fault.kind == "stall":
            self.wfile.flush()
            self.server.hub.wait(600)
        with contextlib.suppress(OSError):  # the client may have been first
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Requests are in `hub.log`."""
