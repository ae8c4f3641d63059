"""A fake MLflow server that goes away and drops answers, for runs that go on without it."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Server:
    """A fake of the MLflow REST endpoints a run needs; can be down, or drop its responses."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int, float]] = []
        self.runs: list[dict[str, Any]] = []
        self.lose = 0
        self.server: ThreadingHTTPServer | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
                name = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
                content = json.dumps(outer.handle(name, json.loads(body or b"{}") | query)).encode()
                if outer.lose and name == "runs/log-batch":
                    outer.lose -= 1
                    self.connection.close()
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_PATCH = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        if self.server:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def handle(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        experiment = {"experiment_id": "1", "name": "titans", "lifecycle_stage": "active"}
        if name.startswith("experiments/"):
            return {"experiment": experiment, "experiment_id": "1"}
        if name == "runs/create":
            info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"}
            info |= {"start_time": 1, "artifact_uri": "/nowhere", "lifecycle_stage": "active"}
            self.runs = [{"info": info, "data": {"tags": body.get("tags", [])}}]
            return {"run": self.runs[0]}
        if name == "runs/search":
            return {"runs": self.runs}
        if name == "runs/update":
            self.runs[0]["info"]["status"] = body.get("status")
            return {"run_info": self.runs[0]["info"]}
        if name == "runs/get":
            return {"run": self.runs[0]}
        if name == "metrics/get-history":
            history = [p for p in self.points if p[0] == body["metric_key"]]
            return {"metrics": [{"key": k, "step": s, "value": v, "timestamp": 1} for k, s, v in history]}
        if name == "runs/log-batch":
            self.points += [(m["key"], m.get("step", 0), m["value"]) for m in body.get("metrics", [])]
        return {}

    def steps(self, key: str = "loss") -> list[int]:
        return [step for name, step, _ in self.points if name == key]
