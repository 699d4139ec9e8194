"""Cache policies by name; a policy's module is imported when the policy is first used.

A name is registered (`"lru"`), or says where a class outside kvoffload is: `"my_package.policies:MyPolicy"`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from kvoffload.errors import ExtensionAttributeError, ExtensionImportError, ExtensionTypeError, RegistrationError
from kvoffload.manager.policies.base import CachePolicy

_policies: dict[str, tuple[str, str]] = {}


def register_policy(name: str, module_path: str, class_name: str) -> None:
    """Make `name` known as the class `class_name` of module `module_path`; imports nothing.

    Raises:
        RegistrationError: The name is taken, empty, or contains a colon.
    """
    if not name or ":" in name:
        raise RegistrationError(f"a policy name must be non-empty and without a colon, such as 'mine'; got {name!r}")
    if name in _policies:
        raise RegistrationError(
            f"policy {name!r} is already registered as {':'.join(_policies[name])}: choose another name"
        )
    _policies[name] = (module_path, class_name)


def known_policies() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_policies))


def load_policy(name: str) -> type[CachePolicy]:
    """Import and return the policy class that `name` stands for.

    Raises:
        RegistrationError: The name is not registered and is no `module:Class`.
        ExtensionImportError: The module cannot be imported.
        ExtensionAttributeError: The module has no such attribute.
        ExtensionTypeError: The attribute is no subclass of `CachePolicy`.
    """
    module_path, class_name = _policies.get(name, ("", ""))
    if not module_path:
        module_path, colon, class_name = name.partition(":")
        if not (module_path and colon and class_name):
            known = ", ".join(known_policies())
            raise RegistrationError(
                f"unknown cache policy {name!r}: known are {known}, or 'module.path:ClassName' for your own"
            )
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ExtensionImportError(
            f"cache policy '{module_path}:{class_name}': module {module_path!r} cannot be imported: {error}; install "
            "it, or put its folder on PYTHONPATH"
        ) from error
    try:
        policy = getattr(module, class_name)
    except AttributeError:
        raise ExtensionAttributeError(
            f"cache policy '{module_path}:{class_name}': module {module_path!r} has no class {class_name!r}; name a "
            "subclass of CachePolicy that it has"
        ) from None
    if not (isinstance(policy, type) and issubclass(policy, CachePolicy)):
        raise ExtensionTypeError(
            f"cache policy '{module_path}:{class_name}' is {policy!r}: it must be a subclass of CachePolicy"
        )
    return policy


register_policy("lru", "kvoffload.manager.policies.lru", "LRUCachePolicy")
register_policy("arc", "kvoffload.manager.policies.arc", "ARCCachePolicy")
if find_spec("kvoffload.manager.policies.adaptive") is not None:
    register_policy("adaptive", "kvoffload.manager.policies.adaptive", "AdaptiveCachePolicy")
