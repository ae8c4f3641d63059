"""What a job takes along: its files, and the project as a wheel of this checkout or of what is installed.

Ray gives a wheel of `py_modules` to `pip install --target`, which would fetch torch again for every node
and job, so the wheel names no requirements: the nodes have them, or get them locked. And Ray caches wheels
by file name, so that a change under the same version would not arrive: the name holds a hash.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from titans_platform.errors import UsageError

DISTRIBUTION = "titans-lab"
_PACKAGE = Path(__file__).resolve().parents[1]
_LEFT_OUT = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def checkout() -> Path | None:
    """The source tree this code runs from, None where it is installed."""
    tree = _PACKAGE.parents[1]
    return tree if _PACKAGE.parent.name == "platform" and (tree / "pyproject.toml").is_file() else None


def constraints() -> bytes:
    """The locked requirements: every version the project is tested with."""
    tree = checkout()
    return (tree or _PACKAGE / "_shipped").joinpath("constraints.txt").read_bytes()


def requirements() -> list[str]:
    """What the project requires, without its extras."""
    found = importlib.metadata.requires(DISTRIBUTION) or []
    return [line for line in found if "extra ==" not in line]


def lay_out(files: Mapping[str, bytes], folder: Path) -> None:
    """Write ``files`` under ``folder`` by their relative names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def project_wheel(folder: Path) -> Path:
    """Write the project's wheel, without what it requires, into ``folder``; its path.

    The same code gives the same bytes and the same name. Raises UsageError.
    """
    tree = checkout()
    files = _built(tree) if tree else _installed()
    return _write(files, folder)


def _built(tree: Path) -> dict[str, bytes]:
    """The files of the wheel hatchling builds of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip() or "hatchling failed").splitlines()[-1]
            raise UsageError(
                f"the project's wheel cannot be built: {why}; pip install -e '.[dev]' brings hatchling"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}


def _installed() -> dict[str, bytes]:
    """The files of the installed distribution."""
    try:
        found = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"{DISTRIBUTION} is neither installed nor a checkout: nothing to send") from None
    kept = [path for path in found if path.parts[0] != ".." and path.suffix != ".pyc"]
    return {path.as_posix(): path.read_binary() for path in kept}


def _write(files: dict[str, bytes], folder: Path) -> Path:
    """A wheel of ``files``, byte for byte the same for the same files, named by their hash."""
    (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    info = metadata.rpartition("/")[0]
    kept = {
        name: content
        for name, content in sorted(files.items())
        if name not in {f"{info}/{left}" for left in _LEFT_OUT}
    }
    kept[metadata] = _without_requirements(kept[metadata])
    rows = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in kept.items()]
    record = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    # a wheel's build number starts with a digit
    build = f"0{hashlib.sha256(record.encode()).hexdigest()[:12]}"
    wheel = folder / f"{info.removesuffix('.dist-info')}-{build}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in [*kept.items(), (f"{info}/RECORD", record.encode())]:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return wheel


def _without_requirements(metadata: bytes) -> bytes:
    head, blank, body = metadata.decode().partition("\n\n")
    lines = [line for line in head.split("\n") if not line.startswith(("Requires-Dist:", "Provides-Extra:"))]
    return ("\n".join(lines) + blank + body).encode()


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
