"""Unit tests see no variable of this project: those that name programs for tests/integration are no configuration."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVOFFLOAD_") and name != "KVOFFLOAD_TEST_GPU"]:
        monkeypatch.delenv(name)
