"""Cluster files: the actions of each kind, and errors that are raised before any action."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from titans_platform.cli import run
from titans_platform.clusters import KINDS, load_cluster, packaging
from titans_platform.clusters.base import JobInfo
from titans_platform.clusters.packaging import job_environment
from titans_platform.clusters.steps import write_token
from titans_platform.errors import ClusterError, UsageError
from titans_platform.loading import known_files
from titans_platform.runs import preemption
from titans_platform.runs.ray_session import ADDRESS, NODES, available
from titans_platform.runs.spec import Resources, concurrency
from titans_platform.study.grid import known_studies

SECRET = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """A state of its own: clusters that are up on this machine do not reach the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)


def write(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_every_shipped_cluster_loads_and_shows_what_it_would_do(capsys, answer):
    shipped = known_files("clusters")
    assert {load_cluster(str(path)).kind for path in shipped.values()} == set(KINDS)
    for name in shipped:
        for command in ("up", "down"):
            assert run(["cluster", command, name, "--dry-run"]) == 0, command
            out = capsys.readouterr().out
            assert out.strip()
            assert SECRET not in out
    listed = {row["name"]: row for row in answer("cluster", "list")}
    assert (set(listed), listed["nodes"]["state"]) == (set(shipped), "-")


@pytest.mark.parametrize(("text", "line"), [
    ("kind: cloud", "kind: 'cloud' is not one of nodes, existing"),
    ("kind: math:pi", "kind: math:pi is not a subclass of titans_platform.clusters.base.Cluster"),
    ("kind: titans_platform.clusters.base:Cluster", "does not define down_steps, jobs, up_steps, where"),
    ("kind: nodes\nnods: 2", "nods: unknown key; did you mean nodes?"),
    ("kind: nodes\ntoken: {file: x}", "token: these nodes generate their own token"),
    ("kind: existing", "address: missing"),
    ("kind: existing\naddress: head:8265", "address: should be like http://head:8265"),
    ("kind: existing\naddress: http://h:8265\nstorage: runs", "storage: should be an absolute path"),
    ("kind: existing\naddress: http://h:8265\nstorage: s3://b/x", "mount the bucket on every node"),
    ("kind: existing\naddress: http://h:8265\nmlflow: sqlite:///m.db",
     "give the address of an `mlflow server`"),
    ("kind: existing\naddress: http://h:8265\ntoken: {file: a, env: B}", "token.file: give either"),
    ("kind: existing\naddress: http://h:8265\nenv: {RAY_AUTH_TOKEN: abc}", "env: the token does not belong"),
    ("kind: slurm\ncpus_per_node: 4", "storage: missing"),
])  # fmt: skip
def test_a_mistake_in_a_file_is_one_line_with_its_field(tmp_path, refused, text, line):
    error = refused("cluster", "up", write(tmp_path, text), "--dry-run")
    assert error.startswith("error: mine.yaml")
    assert line in error


REMOTE = "kind: existing\naddress: http://head.invalid:8265\nstorage: /mnt/titans\nmlflow: http://head.invalid:5000\n"


@pytest.mark.parametrize(("cut", "put", "line"), [
    ("mlflow: http://head.invalid:5000", "", "mlflow: missing: metrics would go to an SQLite file"),
    ("head.invalid:5000", "localhost:5000", "is a different machine on each node"),
    ("storage: /mnt/titans", "", "storage: missing: the nodes do not see"),
])  # fmt: skip
def test_what_workers_elsewhere_cannot_reach_is_refused_first(tmp_path, refused, cut, put, line):
    path = write(tmp_path, REMOTE.replace(cut, put))
    assert line in refused("sweep", "run", "ablation", "--scale", "smoke", "--cluster", path)


def test_a_missing_token_or_cluster_is_one_line_and_exit_3(tmp_path, refused):
    path = write(tmp_path, REMOTE + f"token: {{file: {tmp_path}/none}}\n")
    command = ["sweep", "run", "ablation", "--scale", "smoke", "--cluster", path]
    assert "no token in file" in refused(*command, code=3)
    write_token(tmp_path / "none", SECRET)
    assert (tmp_path / "none").stat().st_mode & 0o777 == 0o600
    error = refused(*command, code=3)
    assert "no answer" in error
    assert SECRET not in error
    assert run(["cluster", "down", path]) == 0


def test_a_study_goes_with_its_file_and_options(tmp_path, capsys, refused):
    path = write(tmp_path, REMOTE + "env: {NCCL_DEBUG: WARN}\n", "lab.yaml")
    line = ["sweep", "run", "ablation", "--scale", "smoke", "--rows", "LMM,w/o Momentum", "--seeds", "0-1"]
    assert run([*line, "--set", "optim.steps=3", "--cluster", path, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# job folder: constraints.txt, sweeps/ablation.yaml" in out
    assert "--rows 'LMM,w/o Momentum' --seeds 0-1 --set optim.steps=3" in out
    assert "--root /mnt/titans" in out
    assert '"NCCL_DEBUG": "WARN"' in out
    assert '"TITANS_HOME": "/mnt/titans"' in out
    assert '"TITANS_MLFLOW": "http://head.invalid:5000"' in out
    error = refused(*line, "--set", "data.tokenizer=none.model", "--cluster", path, "--dry-run")
    assert "no file none.model here to ship with the job" in error
    assert run([*line, "--set", "data.tokenizer=some-lab/model", "--cluster", path, "--dry-run"]) == 0
    assert "data.tokenizer=some-lab/model" in capsys.readouterr().out


def test_study_travels_with_studies_it_is_like_and_classes_beside_it(tmp_path, monkeypatch):
    job = packaging.study_job(load_cluster("lab"), "drift", "smoke", Path("/mnt"), [], [])
    assert job.name == "drift-smoke"
    assert {"experiments/drift/study.yaml", "experiments/drift/drift.py"} <= set(job.files)
    assert not [name for name in job.files if "test_" in name or name.startswith("sweeps/")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "base.yaml").write_text(known_studies()["ablation"].read_text())
    (tmp_path / "near.yaml").write_text("name: near\nlike: base\n")
    (tmp_path / "sweeps" / "mine.yaml").write_text("name: mine\nlike: ./near.yaml\n")
    job = packaging.study_job(load_cluster("lab"), "mine", "smoke", Path("/mnt"), [], [])
    assert set(job.files) == {"sweeps/mine.yaml", "near.yaml", "sweeps/base.yaml"}
    (tmp_path / "sweeps" / "mine.yaml").write_text("name: mine\nlike: ../near.yaml\n")
    monkeypatch.chdir(tmp_path / "sweeps")
    error = r"like: \.\./near\.yaml: a path with \.\. cannot be shipped with a job"
    with pytest.raises(UsageError, match=error):
        packaging.study_job(load_cluster("lab"), "mine.yaml", "smoke", Path("/mnt"), [], [])


def pods(manifest: dict) -> list[dict]:
    body = manifest["spec"]
    return [group["template"]["spec"] for group in [body["headGroupSpec"], *body["workerGroupSpecs"]]]


def test_kuberay_passes_its_own_yaml_on_with_name_namespace_and_token():
    cluster = load_cluster("kuberay")
    shown = cluster.up_steps()[0].shown
    claim, ray = yaml.safe_load_all(shown.partition("<<'END'\n")[2].removesuffix("END"))
    assert (claim["kind"], claim["spec"]["accessModes"]) == ("PersistentVolumeClaim", ["ReadWriteMany"])
    for pod in pods(ray):
        assert pod.pop("terminationGracePeriodSeconds") > preemption.GRACE
    assert ray["spec"] == {"authOptions": {"mode": "token"}, **cluster.ray}
    for item, name in ((claim, "titans-storage"), (ray, "kuberay")):
        assert (item["metadata"]["name"], item["metadata"]["namespace"]) == (name, "titans")
        assert item["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "titans"}
    for pod in pods(ray):
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/mnt/titans"
        assert pod["securityContext"]["runAsNonRoot"] is True
    gpu = pods(ray)[1]
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert gpu["nodeSelector"]
    # the server refuses what it does not know
    assert "apply --validate=strict" in shown


@pytest.mark.parametrize(("old", "new", "line"), [
    ("ray:\n", "pools: []\nray:\n", "pools: unknown key; valid: kind"),
    ("ray:\n", "ray:\n  authOptions: {mode: disabled}\n", "ray.authOptions: is set by titans"),
    ("storage: /mnt/titans", "storage: /mnt/other", "ray.headGroupSpec: does not mount the storage"),
    (" volumeMounts:", " mounts:", "ray.headGroupSpec: template.spec.containers.0.volumeMounts: missing"),
])  # fmt: skip
def test_what_kuberay_would_run_wrongly_is_refused(tmp_path, old, new, line):
    text = known_files("clusters")["kuberay"].read_text().replace(old, new, 1)
    with pytest.raises(UsageError, match=line.replace(".", "\\.")):
        load_cluster(write(tmp_path, text))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_job_has_the_code_and_passes_it_on(tmp_path):
    site = tmp_path / "site"
    packaging.put_code(site)
    files, shipped = contents(site), "titans_platform/_shipped"
    for name in ("titans_core/memory.py", "titans_kernels/__init__.py", f"{shipped}/clusters/nodes.yaml"):
        assert name in files
    assert files[f"{shipped}/constraints.txt"] == (packaging.checkout() / "constraints.txt").read_bytes()
    # where there is no checkout, what was sent is all there is
    code = "import titans_platform as t; print(t.__file__); "
    code += "from titans_platform.clusters import packaging as p; "
    code += "import pathlib, sys; p.put_code(pathlib.Path(sys.argv[1])); print(p.checkout())"
    command = [sys.executable, "-c", code, str(tmp_path / "again")]
    printed = subprocess.check_output(command, env={"PYTHONPATH": str(site)}, text=True).split()
    assert printed == [f"{site}/titans_platform/__init__.py", "None"]
    assert contents(tmp_path / "again") == files


def test_job_has_requirements_and_exit_codes_of_a_shell(monkeypatch):
    triton = 'triton>=3.6; sys_platform == "linux"'
    lines = ["torch>=2.11", triton, "click>=8.2; extra == 'train'", "pytest>=8.3; extra == 'test'"]
    monkeypatch.setattr(packaging.importlib.metadata, "requires", lambda name: lines)
    assert packaging.requirements() == ["torch>=2.11", triton, "click>=8.2"]
    for state, codes in (
        ("succeeded", {0: 0}), ("failed", {4: 4, -9: 137, None: 1}), ("stopped", {None: 130}),
    ):  # fmt: skip
        assert {code: JobInfo("a-1", "a", state, code=code).shell_code for code in codes} == codes


def test_cells_are_planned_on_what_a_cluster_can_grow_to(monkeypatch):
    whole = Resources(workers=8, cpus_per_worker=4, gpus_per_worker=1)
    for name, cells in (("kuberay", 4), ("launcher", 2)):
        env = job_environment(load_cluster(name))
        monkeypatch.setenv(ADDRESS, env[ADDRESS])
        monkeypatch.setenv(NODES, env[NODES])
        assert concurrency(whole, available(whole)) == cells
    assert NODES not in job_environment(load_cluster("lab")), "what is alive is all there is"
    # a worker is not split over two nodes
    wide = Resources(workers=1, cpus_per_worker=100)
    monkeypatch.setenv(NODES, json.dumps([{"CPU": 96}, {"CPU": 96}]))
    with pytest.raises(ClusterError, match="100 CPU"):
        concurrency(wide, available(wide))
