"""Prints what pyproject.toml asks for, development tools included, one requirement a line."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python < 3.11
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
sys.stdout.write("\n".join(project["dependencies"] + project["optional-dependencies"]["dev"]) + "\n")
