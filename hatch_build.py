"""Bakes the commit into what is built, so that an installed wheel can say which code made a number."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "platform/titans_platform"


class BakeCommit(BuildHookInterface):
    """Adds titans_platform/_commit.txt to a wheel and to a source distribution."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the commit aside and have the builder take it in; a source tree itself is left as it is."""
        provenance = _load(Path(self.root) / SOURCE / "provenance.py")
        inside = Path(self.root) / SOURCE / provenance.BAKED
        if version == "editable" or inside.exists():
            return
        baked = Path(self.directory) / provenance.BAKED
        baked.parent.mkdir(parents=True, exist_ok=True)
        baked.write_text(provenance.commit_of_tree(Path(self.root)) + "\n")
        package = "titans_platform" if self.target_name == "wheel" else SOURCE
        build_data["force_include"][str(baked)] = f"{package}/{provenance.BAKED}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Take away the file that was written aside."""
        (Path(self.directory) / "_commit.txt").unlink(missing_ok=True)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # where its dataclasses look for the types of their fields
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
