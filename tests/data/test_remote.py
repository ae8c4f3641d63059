"""Shards in a bucket: a real S3 server on loopback, behind a proxy with intermittent failures."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, count, cycle, repeat
from pathlib import Path

import numpy as np
import pytest

from titans_platform.config import DataConfig
from titans_platform.data import NotPrepared, open_prepared, prepare, shards, store
from titans_platform.data.store import ShardCache
from titans_platform.errors import TitansError, UsageError

pytestmark = pytest.mark.slow
LENGTH, SHARD, SHARDS = 15, 1024, 20
ROWS = SHARDS * 68


class Proxy(BaseHTTPRequestHandler):
    """Forwards to ``target``; each so many-th request for a shard fails, in one of three ways in turn."""

    protocol_version = "HTTP/1.1"
    target, every, seen = 0, 0, Counter[str]()
    asked, ways = count(1), cycle([*["500", "reset"] * 5, "stall"])

    def answer(self) -> None:
        kind = "fine"
        if self.command == "GET" and ".arrow" in self.path and self.every:
            kind = "fine" if next(self.asked) % self.every else next(self.ways)
        self.seen[kind] += 1
        if kind == "stall":
            time.sleep(4)
        if kind in ("reset", "stall"):
            self.close_connection = True
            return
        if kind == "500":
            self.send_error(500)
            return
        # either side may be gone when a test ends
        with closing(HTTPConnection("127.0.0.1", self.target)) as connection, suppress(OSError):
            connection.request(self.command, self.path, headers=dict(self.headers))
            self.forward(connection.getresponse())

    def forward(self, reply: HTTPResponse) -> None:
        content = reply.read()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        if self.command != "HEAD" and reply.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = answer

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture(scope="module")
def bucket():
    """The URI of a bucket, and the one behind the proxy."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    Proxy.target = server.get_host_and_port()[1]
    connection = HTTPConnection("127.0.0.1", Proxy.target)
    connection.request("PUT", "/shards")
    assert connection.getresponse().status == 200
    base = "s3://key:secret@shards/data?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:"
    yield f"{base}{Proxy.target}", f"{base}{proxy.server_address[1]}"
    proxy.shutdown()
    proxy.server_close()
    server.stop()


@pytest.fixture(scope="module")
def uploaded(bucket, tmp_path_factory) -> DataConfig:
    """Twenty shards of 68 rows in the bucket, none of them here."""
    source = {"kind": "corpus", "max_tokens": SHARDS * SHARD, "validation_fraction": 0.0}
    value = {"sources": [source], "sequence_length": LENGTH, "cache_gb": 3e-5}
    straight, behind = (DataConfig.model_validate_json(json.dumps(value | {"store": uri})) for uri in bucket)
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", 2 * SHARD)
        prepare(straight, root)
    assert not list(root.rglob("*.arrow")), "nothing stays here"
    return behind


@pytest.fixture
def prepared(uploaded, tmp_path, monkeypatch) -> DataConfig:
    """The same, with nothing in the cache and a proxy that lets everything pass."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * SHARD)
    monkeypatch.setenv("TITANS_CACHE", str(tmp_path / "cache"))
    Proxy.every = 0
    Proxy.seen.clear()
    return uploaded


def test_four_readers_lose_nothing_and_repeat_nothing(prepared, tmp_path):
    """An epoch by four ranks that open the data themselves, with a cache of a third of the shards."""
    Proxy.every = 4
    batch = 20

    def rows(rank: int) -> list[tuple[int, ...]]:
        stream = open_prepared(prepared, tmp_path / f"root{rank}").train_stream(batch, 3, rank, 4)
        assert stream.rows == [ROWS]
        steps = range(ROWS // batch)
        return [tuple(row) for step in steps for row in stream.batch(step).tokens.tolist()]

    with ThreadPoolExecutor(4) as pool:
        read = Counter(row for part in pool.map(rows, range(4)) for row in part)
    local = prepared.model_copy(update={"store": None})
    whole = prepare(local, tmp_path / "local").sources[0].train
    firsts = whole.first_tokens(np.arange(ROWS)).tolist()
    assert read == Counter(tuple(whole.read(first, first + LENGTH + 1).tokens.tolist()) for first in firsts)
    assert {"500", "reset"} <= set(Proxy.seen)
    held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.arrow"))
    assert 0 < held <= prepared.cache_gb * 1e9


def test_name_equals_local_shards_and_a_stalled_request_is_repeated(prepared, tmp_path, monkeypatch):
    local = prepared.model_copy(update={"store": None})
    assert prepare(local, tmp_path / "local").fingerprint == open_prepared(prepared, tmp_path).fingerprint
    monkeypatch.setattr(Proxy, "every", 1)
    monkeypatch.setattr(Proxy, "ways", chain(["stall"], repeat("fine")))
    open_prepared(prepared, tmp_path).train_stream(99, 0).batch(0)
    assert Proxy.seen["stall"] == 1


def test_bucket_without_the_data_or_an_answer_is_one_error(prepared, tmp_path, monkeypatch):
    other = prepared.model_copy(update={"seed": 9})
    with pytest.raises(NotPrepared, match=r"^data: not prepared in s3://.*run titans data prepare"):
        open_prepared(other, tmp_path)
    with pytest.raises(UsageError, match=r"^data\.store: nothing://x cannot be opened"):
        open_prepared(prepared.model_copy(update={"store": "nothing://x"}), tmp_path)
    monkeypatch.setattr(store, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(store, "FIRST_BACKOFF", 0.01)
    stream = open_prepared(prepared, tmp_path).train_stream(4, 0)
    monkeypatch.setattr(Proxy, "every", 1)
    monkeypatch.setattr(Proxy, "ways", repeat("500"))
    said = r"^s3://.*/train-000\d\d\.arrow: the object store does not respond, after 2"
    with pytest.raises(TitansError, match=said):
        stream.batch(0)


def info_of(content: bytes, name: str = "a.arrow") -> shards.ShardInfo:
    import hashlib

    sha256 = hashlib.sha256(content).hexdigest()
    return shards.ShardInfo(file=name, rows=1, bytes=len(content), sha256=sha256, mtime_ns=0)


def test_cache_drops_the_least_used_and_files_are_fetched_ahead(tmp_path):
    held = ShardCache(250 / 1e9, tmp_path)
    contents = [bytes([i]) * 100 for i in range(3)]
    first, second, third = map(info_of, contents)
    path = held.fetch(first, lambda: iter([contents[0]]), "first")
    held.fetch(second, lambda: iter([contents[1]]), "second")
    time.sleep(0.01)
    assert held.fetch(first, lambda: pytest.fail("it is here"), "first") == path
    held.fetch(third, lambda: iter([contents[2][:50], contents[2][50:]]), "third")
    left = {path.read_bytes() for path in tmp_path.glob("*.arrow")}
    assert left == {contents[0], contents[2]}
    with pytest.raises(UsageError, match=r"^s3://b/second: corrupted shard"):
        held.fetch(second, lambda: iter([b"wrong" * 20]), "s3://b/second")
    assert not list(tmp_path.glob("*.partial"))
    fetched: list[str] = []
    done = threading.Event()

    def fetch(info: shards.ShardInfo) -> Path:
        fetched.append(info.file)
        if len(fetched) == 2:
            raise UsageError("raised again where it is needed")
        if len(fetched) == 3:
            done.set()
        return Path(info.file)

    ahead = store.Prefetcher(fetch)
    ahead.request([info_of(b"", name) for name in "abc"])
    assert done.wait(10)
    assert fetched == ["a", "b", "c"]
