"""What ctypes is told of the C++ functions is what the sources say."""

from __future__ import annotations

import re

from octavo.kernels.cpu.build import SOURCE_DIR
from octavo.kernels.cpu.signatures import RESULTS, SIGNATURES

LETTERS = {"int64_t": "n", "int32_t": "i", "float": "f", "Parallel": "p", "void": ""}


def letter(declared: str) -> str:
    """Of `const float* scales` or of a result's type."""
    return "p" if "*" in declared else LETTERS[declared.split()[0]]


def test_every_function_is_declared_as_it_is() -> None:
    found: dict[str, tuple[str, str]] = {}
    for source in SOURCE_DIR.glob("*.cpp"):
        functions = re.findall(r"^OCTAVO_API ([\w*]+) (\w+)\(([^)]*)\)", source.read_text(), re.M)
        for result, name, arguments in functions:
            found[name] = ("".join(letter(a) for a in arguments.split(",") if a.strip()), letter(result))
    assert len(found) >= 30
    assert found == {name: (types, RESULTS.get(name, "i")) for name, types in SIGNATURES.items()}
