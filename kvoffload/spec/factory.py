"""`OffloadingSpecFactory`: spec names, resolved when they are used. Reference, chapter 2."""

from __future__ import annotations

import importlib
import logging
from typing import ClassVar

from kvoffload.config import OffloadConfig
from kvoffload.errors import ExtensionAttributeError, ExtensionImportError, ExtensionTypeError, RegistrationError
from kvoffload.spec.base import KVCacheConfig, OffloadingSpec

logger = logging.getLogger(__name__)


class OffloadingSpecFactory:
    """Registry of specs by name; a module is imported at the first use of its spec, not at registration."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Register the spec `class_name` of `module_path` under `name`; nothing is imported.

        Raises:
            RegistrationError: The name is taken.
        """
        if name in cls._registry:
            taken = ".".join(cls._registry[name])
            raise RegistrationError(f"spec {name!r} is already registered as {taken}: choose another name")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def create_spec(cls, config: OffloadConfig, kv_cache_config: KVCacheConfig) -> OffloadingSpec:
        """Return the spec that `config.spec_name` names: a registered one, else from `config.spec_module_path`.

        Raises:
            RegistrationError: The name is not registered and no module is given.
            ExtensionImportError: The module cannot be imported.
            ExtensionAttributeError: The module has no such class.
            ExtensionTypeError: What it holds is no `OffloadingSpec`.
            ConfigError: The spec refuses the configuration.
        """
        name = config.spec_name
        if name in cls._registry:
            module_path, class_name = cls._registry[name]
        elif config.spec_module_path is not None:
            module_path, class_name = config.spec_module_path, name
        else:
            known = ", ".join(sorted(cls._registry))
            raise RegistrationError(
                f"spec_name {name!r} is not registered (known: {known}): use one of them, or set "
                "spec_module_path to the module that holds the class"
            )
        spec_class = _resolve(module_path, class_name)
        logger.info("offloading spec %s from %s", class_name, module_path)
        return spec_class(config, kv_cache_config)


def _resolve(module_path: str, class_name: str) -> type[OffloadingSpec]:
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ExtensionImportError(
            f"spec_module_path {module_path!r} of spec_name {class_name!r} cannot be imported: {error}; install it, or "
            "put its folder on PYTHONPATH"
        ) from error
    found: object = getattr(module, class_name, None)
    if found is None:
        raise ExtensionAttributeError(
            f"spec_module_path {module_path!r} has no class {class_name!r}: set spec_name to one that it has"
        )
    if not (isinstance(found, type) and issubclass(found, OffloadingSpec)):
        raise ExtensionTypeError(
            f"spec_name {class_name!r} of spec_module_path {module_path!r} must be a subclass of OffloadingSpec; "
            f"got {found!r}"
        )
    return found


OffloadingSpecFactory.register_spec("CPUOffloadingSpec", "kvoffload.spec.cpu", "CPUOffloadingSpec")
