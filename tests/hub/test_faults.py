"""Faults of the Hub at every request of a push: it ends soon, in one line, without the token, with nothing or all."""

import errno
import functools
import inspect
import itertools
import math
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import call
from hub_api import STEPS
from hub_client import TOKEN, hub_in_process
from huggingface_hub import close_session, get_session, set_client_factory
from huggingface_hub.utils import _http
from transformers import BertConfig, BertForSequenceClassification

from aswa_hf import ASWA
from aswa_hf.checkpoints import average_checkpoints
from aswa_hf.cli.push import push as push_command
from aswa_hf.hub import HubError, push_to_hub, save_run, write_repository
from aswa_hf.hub_requests import TIMEOUT, bounded_requests
from aswa_hf.kge import LinkPredictor, load_kg
from aswa_hf.vision import load_cifar

SHORT = 0.5  # seconds, where any error will do
STALLED = 2.0  # for a request that is never answered
UPLOAD = ("validate-yaml", "preupload", "lfs-batch", "lfs-upload", "lfs-verify")
REQUESTS = ("create", "info", "refs", *UPLOAD, "commit", "tag")
STATUSES = (400, 401, 403, 404, 408, 409, 412, 413, 429, 500, 502, 503, 504)
TEXTS = ("", "<html>Sign in</html>", "null", "[]", "{}", '{"error": "x"}', "{" * 5000, '"' + "x" * 100_000 + '"')
TITLES = ["initial commit", "Add ASWA checkpoint"]


def faults():
    """Every fault that is tried: its name, and the call that arms it."""
    for what, status, times in itertools.product(REQUESTS, STATUSES, (1, 99)):
        yield f"{what} {status} x{times}", "fail", (what, status, times), {"message": f"not with {TOKEN}"}
    for what, seconds in itertools.product(("create", "info", "preupload", "commit"), ("1", "3600")):
        yield f"{what} 429 after {seconds}", "fail", (what, 429, 99), {"Retry-After": seconds}
    moments = ("before", "during", "after")
    for what, kind, when, times in itertools.product(REQUESTS, ("cut", "stall"), moments, (1, 99)):
        yield f"{what} {kind} {when} x{times}", kind, (what, when, times), {}
    for what, text, when in itertools.product(REQUESTS, TEXTS, ("before", "after")):
        yield f"{what} {when} garbled {text[:15]}", "garble", (what, text, when, 99), {}
    for what, status in itertools.product(("create", "commit", "tag"), (500, 504)):
        yield f"{what} {status} after", "fail", (what, status, 1), {"when": "after"}


ALL = list(faults())
SAMPLE = random.Random(13).sample(ALL, 16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    model = BertForSequenceClassification(config)
    aswa = ASWA(model)
    aswa.update(lambda: 0.5)
    aswa.apply()
    folder = tmp_path_factory.mktemp("runs")
    run = save_run(model, folder / "run", aswa, metric="accuracy")
    repository = write_repository(run, folder / "repository", "user/model")
    shutil.copy(repository / "trajectory.png", run)  # drawn once
    return run


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with hub_in_process(monkeypatch, lfs=True) as server:
        yield server


def push(hub, run, repo="user/model", **options):
    return push_to_hub(run, repo, endpoint=hub.endpoint, **options)


def push_with_fault(hub, run, number, case, caplog):
    """Pushes while one fault happens, then again without it, and checks both."""
    name, kind, arguments, options = case
    repo_id = f"user/model{number}"
    caplog.clear()
    getattr(hub, kind)(*arguments, **options)
    message = ""
    try:
        push(hub, run, repo_id, tag="v1", **({"timeout": SHORT} if kind == "stall" else {}))
    except HubError as error:
        message = str(error)
    hub.faults.clear()
    assert TOKEN not in message + caplog.text, name
    assert "\n" not in message, name
    assert len(message) < 1500, name
    # Nothing, or all of it in one commit.
    expected = {file.name for file in run.iterdir()} | {"README.md", ".gitattributes"}
    if repo := hub.repos.get(repo_id):
        assert [commit.title for commit in repo.commits] in (TITLES[:1], TITLES), name
        assert set(repo.files()) in ({".gitattributes"}, expected), name
    assert message or repo.tags == {"v1": repo.branches["main"]}, name
    push(hub, run, repo_id, tag="v1")
    repo = hub.repos[repo_id]
    assert [commit.title for commit in repo.commits] == TITLES, name
    assert set(repo.files()) == expected, name
    assert repo.tags == {"v1": repo.branches["main"]}, name


def test_a_sample_of_faults_leaves_nothing_or_all(hub, run, caplog):
    for number, case in enumerate(SAMPLE):
        push_with_fault(hub, run, number, case, caplog)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_fault_leaves_nothing_or_all(hub, run, caplog, record_property):
    longest = 0.0
    for number, case in enumerate(ALL):
        began = time.monotonic()
        push_with_fault(hub, run, number, case, caplog)
        longest = max(longest, time.monotonic() - began)
    record_property("Hub faults", len(ALL))
    record_property("Hub faults: hangs over 30 s", int(longest > 30))


def test_every_kind_of_fault_is_among_them():
    assert len(ALL) >= 500
    assert {case[1] for case in ALL} == {"fail", "cut", "stall", "garble"}
    assert {case[2][0] for case in SAMPLE} > {"create", "info", "commit"}


@pytest.fixture
def short_commits():
    """Only commits have a short timeout: the other requests must be answered, also on a busy machine."""

    def shorten(request):
        if "/commit/" in request.url.path:
            request.extensions["timeout"] = {"read": STALLED}

    def own_client():
        client = _http.default_client_factory()
        client.event_hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], shorten]}
        return client

    set_client_factory(own_client)
    yield
    set_client_factory(_http.default_client_factory)


@pytest.mark.usefixtures("short_commits")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_stops_answering_ends_the_push_and_is_named_while_it_is_waited_for(
    hub, run, caplog, monkeypatch, when
):
    monkeypatch.setattr("aswa_hf.hub.push.LOOK_TIMEOUT", 60.0)
    hub.stall("commit", when, 99)
    if when == "before":
        ended = "no answer to POST http://.*/api/models/user/model/commit/main for 2 s"
        with pytest.raises(HubError, match=f"failed at the step: upload the files and commit them .{ended}"):
            push(hub, run, timeout=60)
    else:
        push(hub, run, timeout=60)  # the commit is there
    assert "Waiting for the Hub to answer POST http://127.0.0.1" in caplog.text
    assert "/api/models/user/model/commit/main (at most 2 s)" in caplog.text


def test_a_stopped_server_ends_the_push(run, tmp_path):
    code = """
import sys; sys.path[:0] = sys.argv[1:]
from hub_server import HubServer
with HubServer() as hub:
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            endpoint = server.stdout.readline().strip()
            server.send_signal(signal.SIGSTOP)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
                with pytest.raises(HubError, match=r"create the repository \(no answer to POST .* for 2 s\)"):
                    push_to_hub(run, "user/model", endpoint=endpoint, token=TOKEN, timeout=STALLED)
        finally:
            server.send_signal(signal.SIGCONT)
            server.stdin.close()


def test_requests_are_repeated_after_transient_errors_and_a_long_wait_is_refused(hub, run, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    for what in ("create", "info", "commit"):
        hub.fail(what, 429, **{"Retry-After": "5"})
        hub.fail(what, 503)
        hub.cut(what, when="before")
    push(hub, run)
    assert waits == [5, 2, 4] * 3
    assert [commit.title for commit in hub.repos["user/model"].commits] == TITLES
    hub.fail("preupload", 429, **{"Retry-After": "3600"})
    waits.clear()
    with pytest.raises(HubError, match="the server asks to wait for 3600 s: try again after that"):
        push(hub, run)
    assert waits == []


def test_the_words_of_the_storage_are_shown_and_its_signed_address_is_not(hub, run):
    hub.fail("lfs-upload", 403, 99, message="<Error><Code>EntityTooLarge</Code></Error>")
    with pytest.raises(HubError, match=r"Error while uploading '.*EntityTooLarge") as caught:
        push(hub, run)
    assert "signature=" not in str(caught.value)


def test_a_clients_own_timeouts_and_hooks_stay(hub, run):
    seen = []

    def own_client():
        client = _http.default_client_factory()
        client.timeout = 77
        client.event_hooks = {"request": [*client.event_hooks["request"], seen.append], "response": []}
        return client

    set_client_factory(own_client)
    try:
        with bounded_requests(40):
            push(hub, run)
            close_session()  # as the library does after some errors
            get_session().get(f"{hub.endpoint}/api/models/user/model")
        timeouts = {request.url.path: request.extensions["timeout"]["read"] for request in seen}
        assert timeouts["/api/models/user/model/commit/main"] == 77
        assert timeouts["/api/models/user/model/revision/main"] == 40  # the library asks for none here
        assert get_session().event_hooks["request"][1:] == [seen.append]
        assert _http._GLOBAL_CLIENT_FACTORY is own_client
    finally:
        set_client_factory(_http.default_client_factory)


def test_a_timeout_is_a_time_and_the_commands_default_is_the_functions(run):
    assert inspect.signature(push_command).parameters["timeout"].default == TIMEOUT
    for timeout in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"^timeout must be a number of seconds above 0, got {timeout}"):
            push_to_hub(run, "user/model", token=TOKEN, timeout=timeout)
    complaint = call("push", run, "user/model", "--timeout", "nan")
    assert complaint == "aswa-hf: --timeout must be a number of seconds above 0, got nan."


def test_reading_from_a_hub_that_stops_answering_ends_without_repetition(hub, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", SHORT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.endpoint)
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    short = functools.partial(bounded_requests, SHORT)
    for place in ("aswa_hf.kge.predict", "aswa_hf.hub_requests"):
        monkeypatch.setattr(f"{place}.bounded_requests", short)
    for step in STEPS:
        hub.stall(step, "before", 99)
    with pytest.raises(OSError, match="Found no link predictor at 'user/model'"):
        LinkPredictor.from_pretrained("user/model")
    with pytest.raises(OSError, match=r"Could not download user/model@v1 from the Hub: no answer to GET .* for 0.5 s"):
        average_checkpoints("user/model@v1,v2", strategy="uniform")
    assert "Waiting for the Hub to answer HEAD" in caplog.text
    paths = [(request.method, request.path) for request in hub.log if "/user/model" in request.path]
    assert sorted(set(paths)) == sorted(paths)  # each was sent once


@pytest.mark.parametrize(
    "cause",
    [
        socket.gaierror(-2, "Name or service not known"),
        OSError(errno.ENETUNREACH, "unreachable"),
        OSError(errno.ECONNREFUSED, "refused"),
    ],
)
def test_without_a_network_a_download_ends_at_once_and_a_push_is_tried_again(
    cause, caplog, monkeypatch, run, tmp_path
):
    tried = []

    def connect(*_, **__):
        tried.append(1)
        raise cause

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="Found no link predictor at 'user/model'"):
        LinkPredictor.from_pretrained("user/model")
    assert len(tried) == 1
    with pytest.raises(OSError, match=r"Could not download user/model@v1 .* could not be sent .*check the network"):
        average_checkpoints("user/model@v1,v2", strategy="uniform")
    assert len(tried) == 2
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for load in (load_kg, load_cifar):
        with pytest.raises(ValueError, match=r"could not be sent .*check the network connection"):
            load("user/data", cache_dir=tmp_path)
    assert len(tried) == 4
    assert caplog.text == ""
    monkeypatch.setattr("aswa_hf.hub_requests.WAITS", (0.0, 0.0))
    with pytest.raises(HubError, match="check the network connection"):
        push_to_hub(run, "user/model", token=TOKEN)
    assert len(tried) == 7
