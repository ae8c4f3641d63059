"""`titans cluster`: bring clusters up, run commands on them, take them down."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import click

from titans_platform.cli import dry_run_option, echo_json, json_option
from titans_platform.clusters import load_cluster
from titans_platform.clusters.base import DETACHED, Cluster, Job, Jobs, Log
from titans_platform.clusters.steps import Step
from titans_platform.config import DataConfig
from titans_platform.errors import UsageError
from titans_platform.loading import known_files
from titans_platform.study.grid import StudyRun

name_argument = click.argument("name")
job_argument = click.argument("job")
_echo = partial(click.echo, nl=False)
_SIGNAL_BASE = 128
"""Shells report 128 + n for a process killed by signal n."""


@click.group()
def cluster() -> None:
    """Start, monitor and stop clusters, each described by a YAML file, and run jobs on them.

    \b
    Example:
      titans cluster up nodes
    """


@cluster.command("list", short_help="List the known clusters.")
@json_option
def list_clusters(as_json: bool) -> None:
    """List the known clusters with their kind, and whether `up` started them from this machine.

    \b
    Example:
      titans cluster list
    """
    rows = []
    for name, path in sorted(known_files("clusters").items()):
        try:
            chosen = load_cluster(str(path))
            kind, state = chosen.kind, "up" if chosen.recorded() else "-"
            description = " ".join(chosen.description.split())
        except UsageError as error:
            kind, state, description = "?", "invalid", str(error)
        rows.append({"name": name, "kind": kind, "state": state, "path": path, "description": description})
    if as_json:
        return echo_json(rows)
    for row in rows:
        click.echo(f"{row['name']:<12} {row['kind']:<9} {row['state']}\n  {row['description']}")


@cluster.command(short_help="Bring a cluster up.")
@name_argument
@dry_run_option
@json_option
def up(name: str, dry_run: bool, as_json: bool) -> int | None:
    """Bring the cluster NAME up (a name in clusters/, or a YAML file).

    --dry-run prints the commands and manifests as a shell script and runs nothing.

    \b
    Example:
      titans cluster up nodes --dry-run
    """
    chosen = load_cluster(name)
    if dry_run:
        return _show(chosen.up_steps(), as_json)
    where = chosen.up()
    if as_json:
        return echo_json({"name": chosen.name, "kind": chosen.kind, "where": where})
    click.echo(f"{chosen.name} is up: {where}")
    click.echo(f"next: titans sweep run ablation --scale smoke --cluster {name}")


@cluster.command(short_help="Show a cluster's nodes and jobs.")
@name_argument
@json_option
def status(name: str, as_json: bool) -> None:
    """Show the state, nodes and jobs of the cluster NAME.

    \b
    Example:
      titans cluster status nodes
    """
    chosen = load_cluster(name)
    report: dict[str, Any] = {"name": chosen.name, "kind": chosen.kind, **chosen.status()}
    if as_json:
        return echo_json(report)
    version = f", Ray {report['ray_version']}" if "ray_version" in report else ""
    click.echo(f"{report['name']} ({report['kind']}): {report['state']}, {report['where']}{version}")
    for node in report.get("nodes", []):
        role, state = "head" if node["head"] else "worker", "alive" if node["alive"] else "dead"
        gpus = f" {node['gpus']:g} GPU" if node.get("gpus") else ""
        click.echo(f"  {node['id']:<10} {role:<7} {state:<6} {node['ip']:<15} {node['cpus']:g} CPU{gpus}")
    for job in report.get("jobs", []):
        code = f" (exit code {job['code']})" if job["code"] else ""
        click.echo(f"  job {job['id']}: {job['state']}{code}")


@cluster.command(
    short_help="Submit a titans command as a job.", context_settings={"ignore_unknown_options": True}
)
@name_argument
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--detach", is_flag=True, help="Print the job id without following the log.")
@dry_run_option
@json_option
def submit(name: str, command: tuple[str, ...], detach: bool, dry_run: bool, as_json: bool) -> int:
    """Submit COMMAND (without `titans`) as a job to the cluster NAME; follow its log, return its exit code.

    Put -- before a COMMAND that has options. Ctrl-C detaches; the job keeps running.

    \b
    Example:
      titans cluster submit nodes -- sweep report ablation --scale smoke
    """
    from titans_platform.clusters.packaging import check_reachable, titans_job

    words = command[1:] if command[0] == "titans" else command
    first = next((word for word in words if not word.startswith("-")), "")
    root = click.get_current_context().find_root()
    commands = cast(click.Group, root.command).list_commands(root)
    if first not in commands:
        raise UsageError(f"COMMAND: {first!r} is no command of titans; give one of {', '.join(commands)}")
    chosen = load_cluster(name)
    check_reachable(chosen)
    return _submit(chosen, name, titans_job(chosen, words), dry_run, as_json, detach)


@cluster.command(short_help="Print and follow a job's log.")
@name_argument
@job_argument
def logs(name: str, job: str) -> int:
    """Print the log of JOB from its start, follow it to its end, and return the job's exit code.

    \b
    Example:
      titans cluster logs nodes ablation-smoke-1f3a9c
    """
    with load_cluster(name).connected() as jobs:
        return _follow(jobs, name, job, Log(_echo))


@cluster.command(short_help="Stop a job.")
@name_argument
@job_argument
def stop(name: str, job: str) -> None:
    """Stop JOB. Finished cells are kept; submit the same command again to resume.

    \b
    Example:
      titans cluster stop nodes ablation-smoke-1f3a9c
    """
    with load_cluster(name).connected() as jobs:
        jobs.stop(job)
    click.echo(f"stopping {job}")


@cluster.command(short_help="Take down what `up` started.")
@name_argument
@dry_run_option
def down(name: str, dry_run: bool) -> int | None:
    """Take the cluster NAME down: stop what `titans cluster up` started here, and nothing else.

    \b
    Example:
      titans cluster down nodes
    """
    chosen = load_cluster(name)
    if dry_run:
        return _show(chosen.down_steps())
    chosen.down()
    click.echo(f"{chosen.name} is down")


def run_study_on(name: str, context: click.Context, study: StudyRun) -> int:
    """Submit the `sweep run` of ``context`` to the cluster ``name``; returns its exit code."""
    from titans_platform.clusters.packaging import check_reachable, study_job

    params, chosen = context.params, load_cluster(name)
    root = _root_on(chosen, context)
    check_reachable(chosen)
    rows, changes = ",".join(params["rows"]), [*params["overrides"], *params["checkpoint_every"]]
    named = [("--rows", rows), ("--seeds", params["seeds"]), ("--concurrency", params["concurrency"])]
    named += [("--set", change) for change in changes]
    options = [part for option, value in named if value for part in (option, str(value))]
    options += ["--rerun-stale"] * params["rerun_stale"]
    job = study_job(chosen, params["study"], study.scale_name, root, options, study.cells)
    return _submit(chosen, name, job, params["dry_run"], params["as_json"])


def prepare_on(name: str, context: click.Context, data: DataConfig) -> int:
    """Submit the `data prepare` of ``context`` to the cluster ``name``; returns its exit code."""
    from titans_platform.clusters.packaging import data_job

    params, chosen = context.params, load_cluster(name)
    options = [part for change in params["overrides"] for part in ("--set", change)]
    job = data_job(chosen, params["config"], _root_on(chosen, context), options, data)
    return _submit(chosen, name, job, params["dry_run"], params["as_json"])


def _root_on(cluster: Cluster, context: click.Context) -> Path:
    """Return the command's --root as the cluster's nodes see it. Raises UsageError."""
    from titans_platform.clusters.packaging import root_on

    explicit = context.get_parameter_source("root") == click.core.ParameterSource.COMMANDLINE
    return root_on(cluster, context.params["root"], explicit)


def _submit(cluster: Cluster, name: str, job: Job, dry_run: bool, as_json: bool, detach: bool = False) -> int:
    """Submit and follow. With ``as_json`` the log goes to stderr, the job's id and exit code to stdout."""
    if dry_run:
        jobs = cluster.jobs()
        return _show([*jobs.access_steps(), *jobs.submit_steps(job, jobs.new_id(job))], as_json)
    with cluster.connected() as jobs:
        job_id = jobs.submit(job)
        if detach:
            if as_json:
                echo_json({"job": job_id})
            else:
                click.echo(job_id)
            return 0
        click.echo(f"job {job_id} on {name}; Ctrl-C detaches", err=True)
        code = _follow(jobs, name, job_id, Log(partial(_echo, err=as_json)))
        if as_json:
            echo_json({"job": job_id, "exit_code": code})
        return code


def _follow(jobs: Jobs, name: str, job_id: str, log: Log) -> int:
    """Write the log until the job ends; returns its exit code, or ``DETACHED`` after Ctrl-C."""
    try:
        code = jobs.follow(job_id, log)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; the job keeps running\n"
            f"  titans cluster logs {name} {job_id}   follow it again\n"
            f"  titans cluster stop {name} {job_id}   stop it",
            err=True,
        )
        return DETACHED
    if code > _SIGNAL_BASE and code != DETACHED:
        killed = f"job {job_id} was killed by signal {code - _SIGNAL_BASE}"
        click.echo(f"{killed}; run the same command again to resume", err=True)
    return code


def _show(steps: Sequence[Step], as_json: bool = False) -> int:
    """Print the steps as a shell script, or as a JSON list."""
    lines = [step.shown for step in steps]
    if as_json:
        echo_json(lines)
    else:
        click.echo("\n".join(lines))
    return 0
