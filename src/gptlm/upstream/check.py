"""Compares an installed library with the private names that gptlm uses of it.

A library may rename private parts in any release, and a patch of a method that is no longer called fails silently.
So each feature checks its names where training starts.
"""

import inspect
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import CodeType
from typing import Any

from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needed:
    """A function, class or attribute of a library.

    Attributes:
        module: its dotted name.
        path: dotted name inside the module.
        parameters: names of parameters that are passed; C functions have no signature and are not checked.
        uses: attributes and keys that the code of the function or class reads or sets, such as instance attributes.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What the installed version lacks; None: nothing."""
        try:
            found: Any = import_module(self.module)
            for name in self.path.split("."):
                found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
        except (ImportError, AttributeError):
            return f"{self.module}.{self.path}"
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        if self.parameters and not self._accepts(found):
            return f"{self.path}({', '.join(self.parameters)})"
        names = set(_names(found)) if self.uses else set()
        return next((f"{self.path}: {name}" for name in self.uses if name not in names), None)

    def _accepts(self, function: Any) -> bool:
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return True
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return True
        return set(self.parameters) <= set(parameters)


def problem(library: str, needed: Iterable[Needed]) -> str | None:
    """One line with library, version and name of the first part that is missing; None where all are there."""
    missing = next(filter(None, (part.missing() for part in needed)), None)
    return missing and f"{library} {version(library)} has no {missing}"


def available(library: str, needed: Iterable[Needed], otherwise: str) -> bool:
    """Whether `needed` are there; else one log line says what is done `otherwise`."""
    found = problem(library, needed)
    if found:
        _warn_once(f"{found}: {otherwise}")
    return not found


def require(library: str, needed: Iterable[Needed], feature: str) -> None:
    """Check what has no correct substitute.

    Raises:
        GptlmError: naming library, version, the missing name and the `feature` that needs it.
    """
    found = problem(library, needed)
    if found:
        raise GptlmError(f"{found}, which {feature} needs; install a version that pyproject.toml allows")


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _names(owner: Any) -> Iterator[str]:
    """Attribute names and string constants in the code of a function, or of all functions of a class and its bases."""
    if inspect.isclass(owner):
        for base in owner.__mro__[:-1]:
            for member in vars(base).values():
                yield from _names(member) if callable(member) or isinstance(member, property) else ()
        return
    if isinstance(owner, property):
        owner = owner.fget
    code = getattr(inspect.unwrap(owner), "__code__", None)
    pending = [code] if code else []
    while pending:
        code = pending.pop()
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
