"""Requests to the Hub that always end: a timeout for each, retries after transient errors, errors in one line."""

from __future__ import annotations

import errno
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from huggingface_hub import get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import _http

TIMEOUT = 20.0  # seconds
WAITS = (1.0, 2.0, 4.0)  # seconds before each retry
LONGEST_WAIT = 20.0  # seconds that a server may ask for during a push
TRANSIENT = (408, 429, 500, 502, 503, 504)
REASON_LENGTH = 500

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class HubError(OSError):
    """Raised if a push fails; says at which step and why, and that the push can be repeated."""


class NoAnswerError(HubError, OfflineModeIsEnabled):
    """Raised instead of the library's own timeout error, after which it would try five more times.

    The library treats it as being offline: a download uses what is in the cache.
    """


class UnreachableError(NoAnswerError):
    """Raised if the server's name cannot be resolved, if the network is unreachable, or if it refuses the connection.

    The library would try six times. A push, which may run unattended for hours, tries again; a download fails at once.
    """


def check_timeout(timeout: float) -> None:
    """Raises ValueError for a timeout that would never be reached, or at once."""
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout:g}.")


@contextmanager
def bounded_requests(timeout: float = TIMEOUT, *, longest_wait: float = LONGEST_WAIT) -> Iterator[list[NoAnswerError]]:
    """Inside the block, every request of huggingface_hub ends after `timeout` seconds without an answer.

    A request fails if the server asks to wait for more than `longest_wait` seconds in total. The client stays the
    same, and so do its own timeouts and those of single requests. Yields the list of requests that had no answer.
    """
    check_timeout(timeout)

    def limit(request: Any) -> None:
        limits = request.extensions.get("timeout") or {}
        seconds = timeout if limits.get("read") is None else limits["read"]
        watch = _Watch(f"{request.method} {_without_query(str(request.url))}", seconds, unanswered)
        request.extensions.setdefault("trace", watch)
        for kind in ("connect", "read", "write", "pool"):
            limits[kind] = timeout if limits.get(kind) is None else limits[kind]
        request.extensions["timeout"] = limits

    waits: list[float] = []
    unanswered: list[NoAnswerError] = []

    def check_wait(response: Any) -> None:
        waits.append(_retry_after(response))
        if sum(waits) > longest_wait:  # the library would wait that long
            raise HubError(f"the server asks to wait for {waits[-1]:g} s: try again after that")

    def attach(client: Any) -> Any:
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], limit],
            "response": [*hooks["response"], check_wait],
        }
        return client

    def detach(client: Any) -> None:
        client.event_hooks = {
            kind: [hook for hook in hooks if hook not in (limit, check_wait)]
            for kind, hooks in client.event_hooks.items()
        }

    # The library replaces its client after some errors. There is no public way to extend the factory, and
    # `set_client_factory` would close the client while other threads use it.
    factory = _http._GLOBAL_CLIENT_FACTORY

    def limited_factory() -> Any:
        return attach(factory())

    attach(get_session())
    _http._GLOBAL_CLIENT_FACTORY = limited_factory
    try:
        yield unanswered
    finally:
        if _http._GLOBAL_CLIENT_FACTORY is limited_factory:
            _http._GLOBAL_CLIENT_FACTORY = factory
        detach(get_session())


class _Watch:
    """Follows one request: logs after a quarter of the timeout that it is pending, and ends it after the timeout.

    httpx calls it with the name of each event.
    """

    def __init__(self, request: str, timeout: float, unanswered: list[NoAnswerError]):
        self.request, self.timeout, self.unanswered = request, timeout, unanswered
        self.timer: threading.Timer | None = None

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith("receive_response_headers.started"):
            message = f"Waiting for the Hub to answer {self.request} (at most {self.timeout:g} s)"
            self.timer = threading.Timer(self.timeout / 4, logger.warning, (message,))
            self.timer.daemon = True
            self.timer.start()
        elif self.timer is not None:
            self.timer.cancel()
        error = info.get("exception")
        failure: NoAnswerError | None = None
        if event.endswith(".failed") and type(error).__name__.endswith("Timeout"):
            failure = NoAnswerError(f"no answer to {self.request} for {self.timeout:g} s")
        elif event.endswith("connect_tcp.failed") and error is not None and _is_unreachable(error):
            failure = UnreachableError(f"{self.request} could not be sent ({error}): check the network connection")
        if failure is not None:
            self.unanswered.append(failure)
            raise failure


@dataclass(frozen=True)
class Step:
    """A part of a push: its calls are repeated after transient errors, and its messages never contain the token."""

    what: str
    token: str

    def attempt(self, call: Callable[[], Result]) -> Result:
        """Returns the result of a call; repeats it after 429, 5xx or a closed connection."""
        for wait in WAITS:
            try:
                return call()
            except Exception as error:
                if not is_transient(error):
                    raise
                seconds = max(wait, _retry_after(getattr(error, "response", None)))
                logger.warning(f"Trying again in {seconds:g} s to {self.what}: {self.reason(error)}")
                time.sleep(seconds)
        return call()

    def reason(self, error: BaseException) -> str:
        """Returns what happened in one line, with the text of the server or of the storage behind it."""
        texts: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            text = _text(cause)
            if text and not any(text in other for other in texts):
                texts.append(text)
            # The cause of an error with an HTTP status only repeats it.
            cause = cause.__cause__ if status_of(cause) is None else None
        found = "; ".join(text.rstrip(".") for text in texts) or type(error).__name__
        found = found.replace(self.token, "***") if self.token else found
        return found if len(found) <= REASON_LENGTH else f"{found[:REASON_LENGTH]}…"


def is_transient(error: Exception) -> bool:
    """Returns whether the same request may succeed a moment later."""
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT
    if isinstance(error, UnreachableError):
        return True
    # Errors of httpx have no base class common to all versions of huggingface_hub.
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"NetworkError", "RemoteProtocolError"})


def _is_unreachable(error: BaseException) -> bool:
    """Returns whether no server was found: its name is unknown, there is no network, or no program at the address."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return True
        if isinstance(cause, OSError) and cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def reason_of_download(error: Exception, unanswered: list[NoAnswerError]) -> str:
    """Returns why a download failed: `datasets` reports an error by the name of another."""
    return str(unanswered[-1] if isinstance(error, ConnectionError) and unanswered else error)


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status of an error; None if there was no answer."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _text(error: BaseException) -> str:
    text = " ".join(_without_query(str(error)).split())
    if isinstance(error, (KeyError, TypeError, AttributeError, IndexError)):
        return f"the answer of the Hub could not be understood: {type(error).__name__}: {text}"
    return f"the answer of the Hub is not JSON: {text}" if type(error).__name__ == "JSONDecodeError" else text


def _without_query(text: str) -> str:
    """Removes what follows the path of an address: addresses of the storage are signed there."""
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


def _retry_after(response: Any) -> float:
    """Returns the seconds that a refused request is asked to wait, 0 if it is not."""
    if response is None or response.status_code not in TRANSIENT:
        return 0.0
    limit = _http.parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
