"""Slurm and Kubernetes with fake commands on the PATH: how they are called, and how a job ends."""

import base64
import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titans_platform.cli import run
from titans_platform.clusters import KINDS, load_cluster
from titans_platform.clusters.steps import free_ports
from titans_platform.loading import read_yaml
from titans_platform.provenance import shipped

SECRET = "feed" * 16


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder at the front of the PATH, and what its commands were called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FAKE", str(tmp_path))
    # its path must not lead a job to this checkout
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def add(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$FAKE/calls"\n{script}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return add


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


@pytest.fixture
def slurm(fake, tmp_path):
    """A scheduler that runs a job at once; its Ray only runs what it is given."""
    given = "export SLURM_JOB_ID=77 SLURM_JOB_NODELIST=n1 SLURM_JOB_NUM_NODES=1 SLURM_CPUS_PER_TASK=2\n"
    log = 'log=$(sed -n "s/^#SBATCH --output=//p" "$2")\nbash "$2" > "$log" 2>&1\necho 77\nexit 0'
    fake("sbatch", given + log)
    fake("squeue", 'cat "$FAKE/queue" 2>/dev/null; exit 0')
    fake("scancel", 'rm "$FAKE/queue"')
    fake("scontrol", "echo n1")
    fake("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    rest = 'while [[ $1 != -- ]]; do shift; done; shift; "$@"'
    fake("ray", f'env | grep -E "^(RAY_AUTH|TITANS)" > "$FAKE/env"; {rest}')
    fake("python", f'exec {sys.executable} "$@"')
    text = f"kind: slurm\nstorage: {tmp_path}/shared\ncpus_per_node: 2\noptions: [--constraint=h100]\n"
    path = tmp_path / "hpc.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_slurm_job_runs_the_code_that_was_sent(slurm, tmp_path, capfd):
    assert run(["cluster", "submit", slurm, "--", "sweep", "list"]) == 0
    out = capfd.readouterr().out
    assert "ablation: Table 5" in out
    (job,) = (tmp_path / "shared" / "slurm" / "hpc").iterdir()
    # from the wheel that was unpacked for it
    assert f"{job}/code/titans_platform/_shipped/sweeps/ablation.yaml" in out
    given = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    token = Path(given["RAY_AUTH_TOKEN_PATH"])
    assert (given["RAY_AUTH_MODE"], given["TITANS_RAY_ADDRESS"]) == ("token", "auto")
    assert token.stat().st_mode & 0o777 == 0o600
    called = (tmp_path / "calls").read_text()
    assert token.read_text() not in called + (job / "job.sbatch").read_text() + out
    assert "\nray symmetric-run --address n1:20077 --min-nodes 1" in called
    assert "#SBATCH --constraint=h100" in (job / "job.sbatch").read_text()
    subprocess.run(["bash", "-n", str(job / "job.sbatch")], check=True)
    assert run(["cluster", "logs", slurm, job.name]) == 0
    assert "ablation: Table 5" in capfd.readouterr().out
    # a signal to the batch script reaches the driver alone, which takes a while to write its checkpoints
    (job / "pid").unlink()
    driver = f"echo $$ > {job}/pid\ntrap 'sleep 0.5; exit 7' TERM\nwhile :; do sleep 0.1; done\n"
    (job / "run.sh").write_text(driver)
    allocation = {"JOB_ID": "77", "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "CPUS_PER_TASK": "2"}
    variables = os.environ | {f"SLURM_{name}": value for name, value in allocation.items()}
    batch = subprocess.Popen(["bash", str(job / "job.sbatch")], env=variables)
    while not (job / "pid").exists() or not (job / "pid").read_text():
        time.sleep(0.05)
    batch.terminate()
    assert batch.wait(30) == 7


@pytest.mark.slow
def test_slurm_job_s_exit_code_is_ours_and_stop_cancels(slurm, tmp_path, capfd):
    assert run(["cluster", "submit", slurm, "sweep", "show", "nothing"]) == 2
    assert "no study 'nothing'" in capfd.readouterr().out
    (job,) = (tmp_path / "shared" / "slurm" / "hpc").iterdir()
    assert run(["cluster", "logs", slurm, job.name]) == 2
    (job / "exit").unlink()
    (tmp_path / "queue").write_text("77 RUNNING\n78 RUNNING\n")
    capfd.readouterr()
    assert run(["cluster", "status", slurm, "--json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert [(result["id"], result["state"]) for result in status["jobs"]] == [(job.name, "running")]
    assert run(["cluster", "down", slurm]) == 0
    # the other job is somebody else's
    cancelled = [call for call in calls(tmp_path) if call.startswith("scancel")]
    assert cancelled == ["scancel --batch --signal=TERM 77"]
    capfd.readouterr()
    for command in ("stop", "logs"):
        assert run(["cluster", command, slurm, "none"]) == 3
        assert capfd.readouterr().err == f"error: cluster hpc: no job 'none'; its jobs: {job.name}\n"


def test_missing_scheduler_is_named_in_the_error(tmp_path, monkeypatch, refused):
    path = tmp_path / "hpc.yaml"
    path.write_text(f"kind: slurm\nstorage: {tmp_path}/shared\ncpus_per_node: 2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch: not installed here" in refused("cluster", "up", path, code=3)


def test_kuberay_up_and_down_and_its_token(fake, tmp_path, capfd):
    coded = base64.b64encode(SECRET.encode()).decode()
    answers = f'*"get secret"*) printf {coded};; *port-forward*) echo refused >&2; exit 1;;'
    fake("kubectl", f'case "$*" in {answers} *apply*) cat > /dev/null;; esac')
    assert (run(["cluster", "up", "kuberay"]), run(["cluster", "up", "kuberay"])) == (0, 3)
    # no way in: one line, and nothing of the token
    assert run(["cluster", "status", "kuberay"]) == 3
    error = capfd.readouterr().err
    assert "kubectl" in error
    assert "refused" in error
    fetched = load_cluster("kuberay").token_used.path
    assert (fetched.read_text(), fetched.stat().st_mode & 0o777) == (SECRET, 0o600)
    assert run(["cluster", "down", "kuberay"]) == 0
    deleted = [call for call in calls(tmp_path) if " delete " in call]
    assert deleted == ["kubectl --namespace titans delete raycluster kuberay --ignore-not-found --wait"]
    assert not fetched.exists()
    assert SECRET not in "".join(calls(tmp_path))


def test_files_of_rays_launcher_require_the_token_that_the_cluster_file_reads():
    for name in ("aws", "gcp", "onprem"):
        config = read_yaml(shipped() / f"clusters/launcher/{name}.yaml")
        assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
        for key in ("head_start_ray_commands", "worker_start_ray_commands"):
            assert "RAY_AUTH_MODE=token" in config[key][-1]
    assert str(load_cluster("launcher").token_used) == f"file {Path.home()}/.ray/auth_token"


DASHBOARD = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

JOB = {"submission_id": "sweep-1", "metadata": {"name": "sweep"}, "status": "RUNNING", "start_time": 1000}
REPLIES = {
    "/api/version": {"ray_version": "2.60.0"},
    "/api/v0/nodes": {"data": {"result": {"result": []}}},
    "/api/jobs/": [{**JOB, "driver_exit_code": None}, {**JOB, "submission_id": None}],
}

class Dashboard(BaseHTTPRequestHandler):
    log_message = lambda *_: None

    def do_GET(self):
        allowed = self.headers.get("Authorization") == "Bearer " + sys.argv[2]
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(REPLIES[self.path]).encode() if allowed else b"")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Dashboard).serve_forever()
"""


def test_kind_of_ones_own_is_named_by_its_import_path(fake, tmp_path, capfd, monkeypatch):
    """The kind that clusters/README.md shows; its ssh is a dashboard with one job."""
    readme = Path(__file__).parents[2] / "clusters" / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    (tmp_path / "my_lab.py").write_text(code)
    (tmp_path / "dashboard.py").write_text(DASHBOARD)
    (tmp_path / "token").write_text(SECRET)
    (port,) = free_ports(1)
    fake("ssh", f'exec {sys.executable} "$FAKE/dashboard.py" {port} {SECRET}')
    monkeypatch.chdir(tmp_path)
    gateway = f"kind: my_lab:Gateway\nhost: gate\nport: {port}\ntoken: {{file: {tmp_path}/token}}\n"
    path = tmp_path / "gate.yaml"
    path.write_text(gateway)
    assert run(["cluster", "status", str(path), "--json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert status["kind"] == "my_lab:Gateway"
    assert [(job["id"], job["state"]) for job in status["jobs"]] == [("sweep-1", "running")]
    assert run(["cluster", "logs", str(path), "none"]) == 3
    assert capfd.readouterr().err == "error: cluster gate: no job 'none'; its jobs: sweep-1\n"
    (forward,) = load_cluster(str(path)).jobs().access_steps()
    assert "ssh -N -L" in forward.shown
    # with a line in the registry it has a name
    monkeypatch.setitem(KINDS, "gateway", "my_lab:Gateway")
    path.write_text(gateway.replace("my_lab:Gateway", "gateway"))
    assert load_cluster(str(path)).where().startswith("gate:")
