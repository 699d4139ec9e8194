"""Cache policies by name."""

import subprocess
import sys

import pytest

from kvoffload.errors import ExtensionAttributeError, ExtensionImportError, ExtensionTypeError, RegistrationError
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies import registry
from kvoffload.manager.policies.lru import LRUCachePolicy
from kvoffload.manager.policies.registry import known_policies, load_policy, register_policy


@pytest.fixture(autouse=True)
def unchanged_registry(monkeypatch):
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))


def test_name_is_taken_once():
    """A-C4."""
    register_policy("X", "nowhere", "Nothing")
    with pytest.raises(RegistrationError, match="already registered as nowhere:Nothing") as caught:
        register_policy("X", "nowhere", "Nothing")
    assert isinstance(caught.value, ValueError)
    assert "X" in known_policies()


def test_unknown_name_lists_the_known_ones():
    """A-C4."""
    with pytest.raises(ValueError, match=r"'fifo'.*arc.*lru"):
        CPUOffloadingManager(1, "fifo")


@pytest.mark.parametrize("name", ["", ":", "a:", ":B", "a b"])
def test_malformed_names_are_unknown(name):
    with pytest.raises(RegistrationError):
        load_policy(name)


@pytest.mark.parametrize("name", ["", "a:b"])
def test_names_that_could_be_paths_cannot_be_registered(name):
    with pytest.raises(RegistrationError, match="colon"):
        register_policy(name, "m", "C")


def test_class_outside_the_package_is_named_by_its_path():
    assert load_policy("kvoffload.manager.policies.lru:LRUCachePolicy") is LRUCachePolicy


def test_wrong_type_is_a_type_error():
    """A-C4."""
    with pytest.raises(ExtensionTypeError, match="collections:OrderedDict"):
        load_policy("collections:OrderedDict")
    with pytest.raises(TypeError):
        load_policy("math:pi")


def test_missing_module_and_missing_class_are_named():
    """A-C4."""
    with pytest.raises(ExtensionImportError, match=r"no\.such.*MyPolicy"):
        load_policy("no.such:MyPolicy")
    with pytest.raises(ExtensionAttributeError, match="'math' has no class 'MyPolicy'"):
        load_policy("math:MyPolicy")


def test_registering_imports_nothing():
    """A-C4."""
    code = (
        "import sys; from kvoffload.manager.policies.registry import register_policy;"
        "register_policy('x', 'wave', 'Wave_read'); print('wave' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
