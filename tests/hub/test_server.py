"""The Hub on loopback: what the real clients push to it, load from it and make of its faults."""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import re
import socket
import time
from importlib.metadata import version
from urllib.parse import urlsplit

import pytest
import yaml
from hub_server import HubServer
from hub_store import metadata_errors

TOKEN = "hf_tokenofthetests"

# What a client's call comes to: "done", or the error with its status.
OUTCOME = """
import json, sys, time
time.sleep = lambda seconds: None  # clients wait between their attempts
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download

def outcome(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", "")
        return f"{type(error).__name__} {status}".strip()
    return "done"
"""


@pytest.fixture
def hub():
    with HubServer(TOKEN) as server:
        yield server


def ask(origin, method, path, body=b"", token=None, **headers):
    """Status, headers and content of the answer to one request, without a client library."""
    connection = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=540)
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def commit(hub, *operations, repo="user/model", branch="main", **header):
    lines = [{"key": "header", "value": {"summary": "a commit", **header}}]
    lines += [{"key": key, "value": value} for key, value in operations]
    body = "\n".join(map(json.dumps, lines)).encode()
    return ask(hub.endpoint, "POST", f"/api/models/{repo}/commit/{branch}", body, TOKEN)


def file(path, content):
    return ("file", {"path": path, "content": content, "encoding": "utf-8"})


def files(hub, repo="user/model", revision="main"):
    return {path: content for path, content in hub.repos[repo].files(revision).items() if path != ".gitattributes"}


def steps(hub):
    return [request.step for request in hub.log]


# Without a client


@pytest.mark.parametrize(
    ("asked", "status", "content", "told"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
    ],
)
def test_a_range_of_a_file_is_given(hub, asked, status, content, told):
    repo = hub.add_repo("user/model", {"ten.txt": b"0123456789", "ten.bin": b"0123456789"})
    answer = ask(hub.endpoint, "GET", "/user/model/resolve/main/ten.txt", Range=asked)
    assert (answer[0], answer[2], answer[1]["Content-Range"]) == (status, content, told)
    assert answer[1]["X-Repo-Commit"] == repo.commits[-1].oid
    redirect = ask(hub.endpoint, "GET", "/user/model/resolve/main/ten.bin")
    assert redirect[0] == 302
    large = urlsplit(redirect[1]["Location"])
    answer = ask(f"http://{large.netloc}", "GET", f"{large.path}?{large.query}", Range=asked)
    assert (answer[0], answer[2], answer[1]["Content-Range"]) == (status, content, told)


def test_ids_of_files_are_those_of_git_and_of_git_lfs(hub):
    hub.add_repo("user/model", {"hello.txt": b"hello\n", "hello.bin": b"hello\n"})
    regular = ask(hub.endpoint, "HEAD", "/user/model/resolve/main/hello.txt")
    assert (regular[0], regular[1]["Content-Length"], regular[2]) == (200, "6", b"")
    assert regular[1]["ETag"] == '"ce013625030ba8dba906f756967f9e9ca394464a"'  # git hash-object
    large = ask(hub.endpoint, "HEAD", "/user/model/resolve/main/hello.bin")
    assert (large[0], large[1]["X-Linked-Size"]) == (302, "6")
    assert (
        large[1]["X-Linked-Etag"] == '"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"'
    )  # sha256sum
    rows = json.loads(ask(hub.endpoint, "GET", "/api/models/user/model/tree/main")[2])
    assert [row["path"] for row in rows] == [".gitattributes", "hello.bin", "hello.txt"]
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{rows[1]['lfs']['oid']}\nsize 6\n".encode()
    assert rows[1]["oid"] == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()


def test_a_commit_is_recorded_whole_or_not_at_all(hub):
    repo = hub.add_repo("user/model", {"a.txt": b"a", "sub/b.txt": b"b"})
    before = repo.commits[-1]
    refused = [
        commit(hub, file("c.txt", "c"), ("deletedFile", {"path": "missing.txt"})),
        commit(hub, file("c.txt", "c"), ("lfsFile", {"path": "w.bin", "oid": "0" * 64, "size": 3})),
        commit(hub, file("c.txt", "c"), ("renamedFile", {"path": "a.txt"})),
        commit(hub, file("c.txt", "c"), parentCommit=repo.commits[0].oid),
        commit(hub, file("c.txt", "c"), summary=""),
        commit(hub, file("README.md", "---\nlicense mit\n---\n")),
        commit(hub, file("c.txt", "c"), branch="nowhere"),
    ]
    assert [status for status, *_ in refused] == [404, 400, 400, 412, 400, 400, 404]
    assert (repo.commits[-1], repo.branches) == (before, {"main": before.oid})

    status, _, answer = commit(
        hub, file("a.txt", "A"), ("deletedFolder", {"path": "sub/"}), parentCommit=before.oid[:7]
    )
    assert status == 200
    assert (json.loads(answer)["commitOid"], files(hub)) == (repo.commits[-1].oid, {"a.txt": b"A"})
    assert repo.commits[-1].parents == (before.oid,)
    assert files(hub, revision=before.oid) == {"a.txt": b"a", "sub/b.txt": b"b"}
    assert commit(hub)[0] == 200  # an empty one is recorded: the client is to avoid it
    assert [repo.commits[-1].files, len(repo.commits)] == [repo.commits[-2].files, 4]


def test_a_request_that_ends_in_the_middle_has_no_effect(hub):
    repo = hub.add_repo("user/model")
    connection = http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=540)
    connection.putrequest("POST", "/api/models/user/model/commit/main")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b'{"key": "header", "value": {"summary": "half"}}\n')
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.sock.recv(100) == b""  # the Hub has given it up
    connection.close()
    assert (len(repo.commits), hub.log) == (1, [])


def test_large_files_are_stored_by_signed_addresses_and_never_with_a_token(hub):
    repo = hub.add_repo("user/model")
    content, batch = b"weights", "/user/model.git/info/lfs/objects/batch"
    oid = hashlib.sha256(content).hexdigest()
    asked = json.dumps({"operation": "upload", "objects": [{"oid": oid, "size": len(content)}]}).encode()
    actions = json.loads(ask(hub.endpoint, "POST", batch, asked, TOKEN)[2])["objects"][0]["actions"]
    address = urlsplit(actions["upload"]["href"])
    signed = f"{address.path}?{address.query}"
    assert ask(hub.storage, "PUT", signed, content, TOKEN)[0] == 400
    assert ask(hub.storage, "PUT", signed, b"others")[0] == 400
    assert ask(hub.storage, "PUT", address.path, content)[0] == 403
    assert ask(hub.storage, "GET", signed)[0] == 403  # signed for writing
    verify = urlsplit(actions["verify"]["href"]).path
    told = json.dumps({"oid": oid, "size": len(content)})
    assert ask(hub.endpoint, "POST", verify, told, TOKEN)[0] == 404
    assert repo.lfs == {}
    assert ask(hub.storage, "PUT", signed, content)[0] == 200
    assert ask(hub.endpoint, "POST", verify, told, TOKEN)[0] == 200
    assert repo.lfs == {oid: content}
    assert "actions" not in json.loads(ask(hub.endpoint, "POST", batch, asked, TOKEN)[2])["objects"][0]
    assert commit(hub, ("lfsFile", {"path": "model.bin", "oid": oid, "size": len(content)}))[0] == 200
    assert files(hub) == {"model.bin": content}


def test_faults_happen_as_often_and_where_they_are_asked_for(hub):
    repo = hub.add_repo("user/model", {"a.txt": b"0123456789", "b.txt": b"b"})
    a, b = "/user/model/resolve/main/a.txt", "/user/model/resolve/main/b.txt"
    hub.fail("a.txt", 503, times=2, method="GET")
    assert [ask(hub.endpoint, *call)[0] for call in [("HEAD", a), ("GET", b), ("GET", a), ("GET", a), ("GET", a)]] == [
        200, 200, 503, 503, 200,
    ]  # fmt: skip
    hub.fail("commit", 401)
    hub.fail("commit", 504, when="after")
    assert [commit(hub, file("c.txt", "c"))[0] for _ in range(3)] == [401, 504, 200]
    assert len(repo.commits) == 4  # the one that was answered with 504 is there

    hub.cut("a.txt", when="during")
    with pytest.raises(http.client.IncompleteRead) as half:
        ask(hub.endpoint, "GET", a)
    assert half.value.partial == b"01234"
    for when, commits in [("before", 4), ("after", 5)]:
        hub.cut("commit", when=when)
        with pytest.raises(ConnectionError):
            commit(hub, file("c.txt", "c"))
        assert len(repo.commits) == commits
        assert (hub.log[-1].step, hub.log[-1].status) == ("commit", None)
    assert hub.faults == []

    hub.fail("resolve", 500, times=math.inf)
    assert [ask(hub.endpoint, "GET", a)[0] for _ in range(9)] == [500] * 9
    hub.faults.clear()
    hub.delay("resolve", 0.2)
    start = time.monotonic()
    assert ask(hub.endpoint, "GET", a)[0] == 200
    assert time.monotonic() - start >= 0.2


def test_a_client_is_started_without_variables_that_are_none(hub, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert hub.environment()["PYTHONPATH"] == "elsewhere"
    assert not {"PYTHONPATH", "HF_TOKEN"} & set(hub.environment(PYTHONPATH=None, HF_TOKEN=None))


def test_faults_that_could_never_happen_are_refused(hub):
    with pytest.raises(ValueError, match="'comit' is neither a step"):
        hub.fail("comit")
    with pytest.raises(ValueError, match=r"when is 'during'\. Expected one of before, after"):
        hub.fail("commit", when="during")


@pytest.mark.parametrize(
    "block",
    [
        "license: mit\ntags:\n- a\n- b\nmodel-index:\n- name: x\n  results:\n  - value: 0.5",
        'title: "a: b"\ntext: >\n  folded\n\n  text\nlist: [a,\n  b\n]\n# a comment',
        "license mit",
        "license: mit\nlicense mit",
        "tags:\n\t- a",
    ],
)
def test_metadata_is_refused_where_yaml_is(block):
    try:
        valid = isinstance(yaml.safe_load(block), dict)
    except yaml.YAMLError:
        valid = False
    assert (metadata_errors(f"---\n{block}\n---\n# Card") == []) is valid
    assert metadata_errors(f"---\n{block}\n") == ["the metadata block is not closed by ---"]
    assert metadata_errors(f"# Card\n{block}") == []


# huggingface_hub

ROUND_TRIP = """
import json, os, sys
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem, ModelCard, hf_hub_download

api, told = HfApi(), {}
told["name"] = api.whoami()["name"]
told["url"] = str(api.create_repo("user/model", private=True))
told["again"] = str(api.create_repo("user/model", exist_ok=True))
first = api.upload_folder(repo_id="user/model", folder_path=sys.argv[1], commit_message="first").oid
told["unchanged"] = api.upload_folder(repo_id="user/model", folder_path=sys.argv[1]).oid == first
api.create_tag("user/model", tag="v1.0/a", tag_message="the first")
api.create_tag("user/model", tag="v1.0/a", exist_ok=True)
api.create_branch("user/model", branch="running")
operations = [CommitOperationAdd("sub/a b.json", b"[2]"), CommitOperationDelete("sub/gone.txt")]
second = api.create_commit("user/model", operations, commit_message="second", parent_commit=first).oid
api.upload_file(repo_id="user/model", path_or_fileobj=b"last", path_in_repo="last.txt", revision="running")
told["commits"] = [(c.commit_id, c.title, c.authors) for c in api.list_repo_commits("user/model")]
refs = api.list_repo_refs("user/model")
told["refs"] = {ref.ref: ref.target_commit for ref in refs.branches + refs.tags}

revisions = (None, "v1.0/a", "running", first, second[:8])
told["read"] = [open(hf_hub_download("user/model", "sub/a b.json", revision=r)).read() for r in revisions]
snapshot = api.snapshot_download("user/model", revision="v1.0/a")
told["snapshot"] = sorted(os.path.relpath(os.path.join(r, f), snapshot) for r, _, fs in os.walk(snapshot) for f in fs)
told["weights"] = open(os.path.join(snapshot, "model.safetensors"), "rb").read().hex()
told["exists"] = [api.file_exists("user/model", f) for f in ("sub/a b.json", "sub/gone.txt")]
rows = api.list_repo_tree("user/model", recursive=True, expand=True)
told["changed by"] = {row.path: row.last_commit.title for row in rows}
told["paths"] = [row.path for row in api.get_paths_info("user/model", ["sub", "nothing", "README.md"])]
system = HfFileSystem()
told["glob"] = system.glob("user/model/**/*.json")
with system.open("user/model/model.safetensors") as weights:
    weights.seek(4)
    told["part"] = weights.read(3).hex()

ModelCard("---\\nlicense: mit\\n---\\n# A card").push_to_hub("user/model")
told["card"] = ModelCard.load("user/model").data.license
try:
    api.upload_file(repo_id="user/model", path_or_fileobj=b"---\\nlicense mit\\n---\\n", path_in_repo="README.md")
except ValueError as error:
    told["bad card"] = str(error)
api.update_repo_settings("user/model", private=False)
api.delete_tag("user/model", tag="v1.0/a")
api.create_repo("user/short", repo_type="dataset")
api.delete_repo("user/short", repo_type="dataset")
print(json.dumps(told))
"""


@pytest.mark.skipif(
    tuple(int(part) for part in version("huggingface-hub").split(".")[:2]) < (2, 2),
    reason="ModelCard.push_to_hub validates at huggingface.co, whatever HF_ENDPOINT says",
)
def test_huggingface_hub_pushes_tags_and_downloads_by_revision(hub, tmp_path):
    weights = b"\0\1\2\3" * 500
    folder = {"README.md": b"---\nlicense: apache-2.0\n---\n", "model.safetensors": weights}
    folder |= {"sub/a b.json": b"[1]", "sub/gone.txt": b""}
    for path, content in folder.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    told = json.loads(hub.run(ROUND_TRIP, tmp_path))
    repo = hub.repos["user/model"]
    initial, first, second, running, card = repo.commits
    assert (told["name"], told["url"], told["again"]) == ("user", *[f"{hub.endpoint}/user/model"] * 2)
    assert told["unchanged"] is True
    assert [c.title for c in repo.commits[:3]] == ["initial commit", "first", "second"]
    assert {k: v for k, v in first.files.items() if k != ".gitattributes"} == folder
    assert first.lfs == {"model.safetensors"}
    assert told["commits"] == [[c.oid, c.title, ["user"]] for c in (second, first, initial)]
    assert told["refs"] == {
        "refs/heads/main": second.oid,
        "refs/heads/running": running.oid,
        "refs/tags/v1.0/a": first.oid,
    }
    assert (running.parents, card.parents) == ((first.oid,), (second.oid,))
    assert (running.files["last.txt"], "last.txt" in card.files) == (b"last", False)
    assert told["read"] == ["[2]", "[1]", "[1]", "[1]", "[2]"]
    assert told["snapshot"] == sorted([".gitattributes", *folder])
    assert bytes.fromhex(told["weights"]) == weights
    assert told["exists"] == [True, False]
    assert told["changed by"] == {
        "sub": "second", ".gitattributes": "initial commit", "README.md": "first", "model.safetensors": "first",
        "sub/a b.json": "second",
    }  # fmt: skip
    assert sorted(told["paths"]) == ["README.md", "sub"]
    assert (told["glob"], told["part"]) == (["user/model/sub/a b.json"], "000102")
    assert (told["card"], card.files["README.md"]) == ("mit", b"---\nlicense: mit\n---\n# A card")
    assert "line 2 is not of the form key: value" in told["bad card"]
    assert (repo.private, repo.tags, list(hub.repos)) == (False, {}, ["user/model"])
    assert "unknown" not in steps(hub)
    assert not any(request.authorized for request in hub.log if request.step in ("lfs-upload", "lfs-download"))
    assert TOKEN not in repr(hub.log)


RIGHTS = (
    OUTCOME
    + """
def all_of(token):
    api = HfApi(token=token)
    cache = {"cache_dir": f"cache-{token}"}
    add = lambda: [CommitOperationAdd("new.txt", b"new")]
    return {
        "whoami": outcome(api.whoami),
        "create": outcome(api.create_repo, "user/new"),
        "read public": outcome(api.hf_hub_download, "user/public", "a.txt", **cache),
        "read private": outcome(api.hf_hub_download, "user/private", "a.txt", **cache),
        "list private": outcome(api.model_info, "user/private"),
        "write public": outcome(api.create_commit, "user/public", add(), commit_message="new"),
        "write private": outcome(api.create_commit, "user/private", add(), commit_message="new"),
        "missing repo": outcome(api.model_info, "user/missing"),
        "missing file": outcome(api.hf_hub_download, "user/public", "b.txt", **cache),
        "missing revision": outcome(api.model_info, "user/public", revision="v9"),
    }

print(json.dumps({str(token): all_of(token) for token in (False, *sys.argv[1:])}))
"""
)


def test_clients_get_the_errors_of_the_hub_for_what_they_may_not_do(hub):
    hub.add_user("other", "hf_other")
    hub.add_user("user", "hf_reader", role="read")
    for name in ("public", "private"):
        hub.add_repo(f"user/{name}", {"a.txt": b"a"}, private=name == "private")
    told = json.loads(hub.run(RIGHTS, "hf_wrong", "hf_other", "hf_reader"))
    missing = {"missing file": "RemoteEntryNotFoundError 404", "missing revision": "RevisionNotFoundError 404"}
    nothing, forbidden = "RepositoryNotFoundError 404", "HfHubHTTPError 403"
    unknown, hidden = "HfHubHTTPError 401", "RepositoryNotFoundError 401"
    assert told["hf_wrong"] == dict.fromkeys(told["hf_wrong"], unknown)
    assert told["False"] == missing | {
        "whoami": "ValueError", "create": unknown, "read public": "done", "read private": hidden,
        "list private": hidden, "write public": unknown, "write private": hidden, "missing repo": hidden,
    }  # fmt: skip
    assert told["hf_other"] == missing | {
        "whoami": "done", "create": forbidden, "read public": "done", "read private": nothing,
        "list private": nothing, "write public": forbidden, "write private": nothing, "missing repo": nothing,
    }  # fmt: skip
    assert told["hf_reader"] == missing | {
        "whoami": "done", "create": forbidden, "read public": "done", "read private": "done",
        "list private": "done", "write public": forbidden, "write private": forbidden, "missing repo": nothing,
    }  # fmt: skip
    assert set(hub.repos) == {"user/public", "user/private"}
    assert {len(repo.commits) for repo in hub.repos.values()} == {2}


FAULTS = (
    OUTCOME
    + """
import huggingface_hub
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 2  # what came before a cut is kept in whole chunks
api, told = HfApi(), {}
told["create"] = [outcome(api.create_repo, "user/new") for _ in range(5)]

def push(name):
    operations = [CommitOperationAdd("config.json", b"{}"), CommitOperationAdd("model.safetensors", b"weights")]
    return outcome(api.create_commit, f"user/{name}", operations, commit_message="push")

def load(name, cache):
    def call():
        path = hf_hub_download(f"user/{name}", "model.safetensors", cache_dir=cache)
        assert open(path, "rb").read() == b"weights"
    return outcome(call)

told["push"] = {name: [push(name), push(name)] for name in sys.argv[1].split()}
told["load"] = {name: [load(name, "one"), load(name, "two")] for name in sys.argv[2].split()}
print(json.dumps(told))
"""
)


def test_clients_meet_faults_as_they_would_on_the_hub(hub):
    for status in (401, 403, 500):
        hub.fail("create", status)
    hub.cut("create", when="after")
    # Each on a repository of its own: first the fault, then all over again.
    pushes = {
        "401": lambda: hub.fail("user/401/commit", 401),
        "403": lambda: hub.fail("user/403/commit", 403),
        "503": lambda: hub.fail("user/503/commit", 503),
        "504-after": lambda: hub.fail("user/504-after/commit", 504, when="after"),
        "cut-before": lambda: hub.cut("user/cut-before/commit", when="before"),
        "cut-during": lambda: hub.cut("user/cut-during/commit", when="during"),
        "cut-after": lambda: hub.cut("user/cut-after/commit", when="after"),
        "preupload": lambda: hub.fail("user/preupload/preupload", 503),
        "batch": lambda: hub.fail("user/batch.git/info/lfs/objects/batch", 503),
        "put": lambda: (hub.fail("/large/user/put/", 500), hub.cut("/large/user/put/", when="before")),
        "put-403": lambda: hub.fail("/large/user/put-403/", 403),
        "verify": lambda: hub.fail("user/verify.git/info/lfs/objects/verify", 502),
    }
    loads = {
        "head-503": lambda: hub.fail("user/head-503/resolve", 503, method="HEAD"),
        "get-503": lambda: hub.fail("/large/user/get-503/", 503),
        "get-cut": lambda: hub.cut("/large/user/get-cut/", when="during"),
    }
    for name, arm in (pushes | loads).items():
        hub.add_repo(f"user/{name}", {"model.safetensors": b"weights"} if name in loads else None)
        arm()
    told = json.loads(hub.run(FAULTS, " ".join(pushes), " ".join(loads)))

    failed, done = "HfHubHTTPError {}".format, "done"
    assert told["create"] == [failed(401), failed(403), failed(500), "RemoteProtocolError", failed(409)]
    assert told["push"] == {
        "401": [failed(401), done],
        "403": [failed(403), done],
        "503": [failed(503), done],
        "504-after": [failed(504), done],
        "cut-before": ["RemoteProtocolError", done],
        "cut-during": ["RemoteProtocolError", done],
        "cut-after": ["RemoteProtocolError", done],
        "preupload": [done, done],
        "batch": [done, done],
        "put": [done, done],
        "put-403": ["RuntimeError", done],
        "verify": [done, done],
    }
    assert told["load"] == {"head-503": [done, done], "get-503": [failed(503), done], "get-cut": [done, done]}
    assert hub.faults == []
    for name in pushes:  # once, whatever was told
        assert [c.title for c in hub.repos[f"user/{name}"].commits] == ["initial commit", "push"], name
        assert files(hub, f"user/{name}") == {"config.json": b"{}", "model.safetensors": b"weights"}
    resumed = [request.status for request in hub.log if request.step == "lfs-download" and "get-cut" in request.path]
    assert resumed == [None, 206, 200]


XET = """
import sys
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils._runtime import is_xet_available

HfApi().create_repo("user/model")
HfApi().upload_folder(repo_id="user/model", folder_path=sys.argv[1])
print(is_xet_available(), open(snapshot_download("user/model") + "/model.safetensors").read())
"""


def test_clients_with_xet_work_where_no_file_is_large(tmp_path):
    pytest.importorskip("hf_xet")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with HubServer(TOKEN, lfs=False) as hub:
        assert hub.run(XET, tmp_path, HF_HUB_DISABLE_XET=None) == "True weights\n"
        assert [c.lfs for c in hub.repos["user/model"].commits] == [frozenset()] * 2
        assert "unknown" not in steps(hub)


# transformers, timm and datasets, with one process for all since importing them takes longest

LIBRARIES = """
import copy, json, warnings
import numpy as np
import timm
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from huggingface_hub import HfApi, whoami
from transformers import AutoModel, BertConfig, BertModel

from aswa_hf.kge import load_kg
from aswa_hf.vision.data import load_cifar

torch.set_num_threads(1)
told = {}

def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
first = BertModel(BertConfig(vocab_size=11, **sizes))
second = copy.deepcopy(first)
second.embeddings.word_embeddings.weight.data += 1
first.push_to_hub("user/bert", private=True)
HfApi().create_tag("user/bert", tag="v1")
second.push_to_hub("user/bert", commit_message="more")
oid = HfApi().list_repo_commits("user/bert")[1].commit_id
load = AutoModel.from_pretrained
whoami()
told["bert"] = [same(load("user/bert"), second), same(load("user/bert", revision="v1"), first)]
told["bert"] += [same(load("user/bert", revision=oid), first), same(load("user/bert"), first)]
whoami()
cached = [load("user/bert", local_files_only=True), load("user/bert", revision="v1", local_files_only=True)]
whoami()
told["cached"] = [same(cached[0], second), same(cached[1], first)]

model = timm.create_model("test_resnet", num_classes=3)
timm.models.push_to_hf_hub(model, "user/resnet", safe_serialization=True, private=True)
loaded = timm.create_model("hf-hub:user/resnet", pretrained=True)
told["timm"] = [same(loaded, model), loaded.num_classes]

rows = {"train": "abr bcr cas", "validation": "acr", "test": "bas ccr"}

def triples(text):
    heads, tails, relations = zip(*text.split())
    return Dataset.from_dict({"head": heads, "relation": relations, "tail": tails})

graph = DatasetDict({split: triples(text) for split, text in rows.items()})
graph.push_to_hub("user/kg")
HfApi().create_tag("user/kg", tag="small", repo_type="dataset")
graph["train"] = triples(rows["train"] + " adr")
graph.push_to_hub("user/kg")
HfApi().upload_file(
    path_or_fileobj=b'{"a": "Anna", "b": {"label": "Bob"}}',
    path_in_repo="entities.json",
    repo_id="user/kg",
    repo_type="dataset",
)
small, kg = load_kg("user/kg", revision="small"), load_kg("user/kg")
told["kg"] = [kg.num_entities, kg.num_relations, {split: kg.triples(split).tolist() for split in kg}]
told["small"] = [small.num_entities, small.triples("train").tolist()]
told["vocab"] = [small.vocab.entities, kg.vocab.entities]
HfApi().create_branch("user/kg", branch="damaged", repo_type="dataset")
HfApi().upload_file(
    path_or_fileobj=b"one column",
    path_in_repo="relations.tsv",
    repo_id="user/kg",
    repo_type="dataset",
    revision="damaged",
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    told["damaged"] = load_kg("user/kg", revision="damaged").vocab.entities
told["warned"] = [str(one.message) for one in caught if "without labels" in str(one.message)]

pixels = np.arange(16 * 4 * 4 * 3, dtype=np.uint8).reshape(16, 4, 4, 3)
features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
images = Dataset.from_dict({"img": list(pixels), "label": [0, 1] * 8}, features=features)
DatasetDict(train=images, test=images.select(range(4))).push_to_hub("user/images", private=True)
cifar = load_cifar("user/images", val_ratio=0.25)
told["labels"] = {split: dataset["label"][:] for split, dataset in cifar.items()}
told["names"] = cifar["test"].features["label"].names
told["pixels"] = all(np.array_equal(np.asarray(image), pixels[i]) for i, image in enumerate(cifar["test"]["image"]))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def pushed():
    """A Hub that the libraries have pushed to and loaded from, and what they told."""
    with HubServer(TOKEN) as hub:
        told = json.loads(hub.run(LIBRARIES).splitlines()[-1])
        yield hub, told


def test_transformers_pushes_and_loads_by_revision_and_from_its_cache(pushed):
    hub, told = pushed
    repo = hub.repos["user/bert"]
    assert (repo.private, len(repo.commits)) == (True, 3)
    assert set(files(hub, "user/bert")) == {"README.md", "config.json", "model.safetensors"}
    assert repo.commits[1].files["model.safetensors"] != repo.commits[2].files["model.safetensors"]
    assert told["bert"] == [True, True, True, False]
    assert told["cached"] == [True, True]
    asked = [i for i, step in enumerate(steps(hub)) if step == "whoami"]
    assert "lfs-download" in steps(hub)[asked[0] : asked[1]]
    assert steps(hub)[asked[1] : asked[2] + 1] == ["whoami", "whoami"]  # nothing was asked for in between


def test_timm_pushes_and_loads(pushed):
    hub, told = pushed
    assert set(files(hub, "user/resnet")) == {"README.md", "config.json", "model.safetensors"}
    assert told["timm"] == [True, 3]


def test_a_graph_pushed_by_datasets_is_a_knowledge_graph(pushed):
    hub, told = pushed
    triples = {"train": [[0, 0, 1], [1, 0, 2], [2, 1, 0], [0, 0, 3]], "validation": [[0, 0, 2]]}
    assert told["kg"] == [4, 2, triples | {"test": [[1, 1, 0], [2, 0, 2]]}]
    assert told["small"] == [3, triples["train"][:3]]
    assert told["vocab"] == [["a", "b", "c"], ["Anna", "Bob", "c", "d"]]  # the older revision has no labels
    assert told["damaged"] == ["a", "b", "c", "d"]
    (warned,) = told["warned"]
    assert re.match(r"Identifiers of user/kg are shown without labels: .*relations.tsv, line 1: expected", warned)
    assert len(hub.repos["datasets/user/kg"].commits) == 5


def test_images_pushed_by_datasets_are_split_for_training(pushed):
    hub, told = pushed
    assert {split: sorted(labels) for split, labels in told["labels"].items()} == {
        "train": [0] * 6 + [1] * 6,
        "validation": [0, 0, 1, 1],
        "test": [0, 0, 1, 1],
    }
    assert (told["names"], told["pixels"]) == (["cat", "dog"], True)
    assert hub.repos["datasets/user/images"].private


def test_the_libraries_ask_for_nothing_the_hub_does_not_speak(pushed):
    hub, _ = pushed
    assert "unknown" not in steps(hub)
    assert {request.status for request in hub.log} <= {200, 302, 404, 409}
    assert all(request.authorized for request in hub.log if request.step in ("commit", "create", "preupload"))


OFFLINE = """
import json
from transformers import AutoModel

from aswa_hf.kge import load_kg

told = [AutoModel.from_pretrained("user/bert", revision=revision).num_parameters() for revision in ("main", "v1")]
try:
    AutoModel.from_pretrained("user/other")
except OSError as error:
    told.append(type(error).__name__)
told.append(load_kg("user/kg").vocab.entities)
print(json.dumps(told))
"""


def test_what_was_loaded_once_loads_without_a_network(pushed):
    hub, _ = pushed
    hub.add_repo("user/other", {"config.json": b"{}"})
    before = len(hub.log)
    told = json.loads(hub.run(OFFLINE, HF_HUB_OFFLINE="1").splitlines()[-1])
    assert told[0] == told[1] > 0
    assert told[2:] == ["OSError", ["Anna", "Bob", "c", "d"]]
    assert len(hub.log) == before
