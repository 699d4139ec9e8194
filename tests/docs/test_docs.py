"""What README and docs promise runs: every Python block, and every link inside the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def all_blocks(language):
    pages = [str(page.relative_to(ROOT)) for page in PAGES]
    return [
        pytest.param(page, code, id=f"{page}-{number}")
        for page in pages
        for number, code in enumerate(blocks_of(page, language))
    ]


FRAGMENTS = {  # what stands around a page's fragments, which are not programs of their own: `FRAGMENT[n]` is the n-th
    "docs/metrics.md": """
import asyncio
import numpy as np
from kvoffload import CanonicalKVCaches, OffloadConfig, OffloadService

config = OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=4)
kv_caches = CanonicalKVCaches.from_layers({"layer": np.zeros((8, 64), np.int8)}, block_dim=0)

class request:
    headers = {}

async def main():
    FRAGMENT[0]
    assert b"kvoffload_requests_total" in body and content_type.startswith("text/plain")

asyncio.run(main())
""",
    "docs/ranks.md": """
import asyncio, atexit, subprocess, sys
import numpy as np
import kvoffload as kv

config = kv.OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=4, world_size=2)

if sys.argv[1:]:
    rank, address = int(sys.argv[1]), sys.argv[2]
    layers = {"layer": np.zeros((2, 8, 64), np.int8)}
    FRAGMENT[1]

def start_ranks(address):
    for rank in range(2):
        atexit.register(subprocess.Popen([sys.executable, __file__, str(rank), address]).kill)

async def main():
    FRAGMENT[0]

asyncio.run(main())
""",
}


def filled(frame, fragments):
    """The frame with every `FRAGMENT[n]` line replaced by that fragment, as deep as the line stands."""

    def fragment(found):
        return textwrap.indent(fragments[int(found[2])], found[1])

    return re.sub(r"^( *)FRAGMENT\[(\d)\]\n", fragment, frame, flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "code"), all_blocks("python"))
def test_python_block_runs(page, code, tmp_path):
    if re.search(r"^import torch", code, re.MULTILINE):
        pytest.importorskip("torch")
    if not re.search(r"^(import|from) kvoffload", code, re.MULTILINE):
        code = filled(FRAGMENTS[page], blocks_of(page, "python"))
    (tmp_path / "block.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_resolve(page):
    for target in re.findall(r"\]\((?!https?://|mailto:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_names_every_folder_of_the_package():
    text = (ROOT / "README.md").read_text()
    for folder in (ROOT / "kvoffload").iterdir():
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert f"{folder.name}/" in text, folder.name
