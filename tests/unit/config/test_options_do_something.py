"""No option is there for nothing."""

import re
from pathlib import Path

import pytest

import kvoffload
from kvoffload.config import EventsConfig, OffloadConfig

PACKAGE = Path(kvoffload.__file__).parent
SOURCES = [path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "config.py"]
READ_BY_THE_MODEL = {"gpu_block_size", "block_size"}  # through gpu_block_sizes and block_size_factor


@pytest.mark.parametrize(
    "key", sorted((OffloadConfig.model_fields.keys() | EventsConfig.model_fields.keys()) - READ_BY_THE_MODEL)
)
def test_the_package_reads_the_option(key):
    assert any(re.search(rf"\b(config|settings)\.{key}\b", text) for text in SOURCES)
