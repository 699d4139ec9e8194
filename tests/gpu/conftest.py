"""GPU tests need torch and a CUDA device; elsewhere they skip and say so."""

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    missing = None if torch.cuda.is_available() else pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "/tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(missing)
