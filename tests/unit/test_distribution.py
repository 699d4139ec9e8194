"""Wheel and sdist: what is in them, and that both ways lead to the same wheel."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvoffload

ROOT = Path(__file__).parents[2]
NAME = f"kvoffload-{kvoffload.__version__}"
IGNORED = {"__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def files_below(*folders):
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not IGNORED.intersection(path.parts) and path.suffix not in {".pyc", ".pyo"}
    }


def build(kind, source, target):
    """Build with the backend itself, in a process of its own: it needs no network."""
    code = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    target.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist") / "dist")


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        entry_points = archive.read(f"{NAME}.dist-info/entry_points.txt").decode()
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - about == files_below("kvoffload")
    assert {Path(name).suffix for name in names - about} == {".py", ".pyi", ".typed"}
    assert {"kvoffload/py.typed", "kvoffload/__init__.pyi"} <= names
    assert {name.partition("/")[2] for name in about} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    assert "kvoffload = kvoffload.cli.main:main" in entry_points


def test_the_sdist_holds_what_the_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    wanted = files_below("kvoffload", "tests", "docs", "dashboards", "schemas", ".ci")
    top = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "docker-compose.yml", ".dockerignore"}
    assert wanted | top <= names
    assert names - wanted - top == {"PKG-INFO", ".gitignore"}


def test_a_wheel_from_the_sdist_equals_the_wheel_from_the_tree(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    again = build("wheel", tmp_path / "unpacked" / NAME, tmp_path / "dist")
    assert again.read_bytes() == wheel.read_bytes()
