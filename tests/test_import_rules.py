"""Who may import whom: the contracts in pyproject.toml, and the names that the rest relies on."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Where the name that is imported and the distribution's differ.
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
    "yaml": "pyyaml",
}
# Used where it is installed, and only there: GPU kernels come with PyTorch's CUDA build.
OPTIONAL = {"triton", "transformers", "opentelemetry"}


def test_import_contracts(capfd):
    from importlinter.cli import lint_imports

    failed = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    # Its log settings silence every logger that exists, and with them the tests that read the log.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False
    assert not failed, capfd.readouterr().out


def test_third_party_imports_are_declared():
    """Every library that a module imports is a dependency, or known to be optional."""
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]")[0]
    declared = set(re.findall(r'^\s*"([A-Za-z0-9-]+)', text, re.M))
    missing = set()
    for path in (ROOT / "octavo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in (n.partition(".")[0] for n in names):
                if name in sys.stdlib_module_names or name == "octavo" or name in OPTIONAL:
                    continue
                if DISTRIBUTIONS.get(name, name) not in declared:
                    missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert not missing


def test_importing_octavo_imports_no_library():
    code = (
        "import sys, octavo\n"
        "print([m for m in ('torch', 'numpy', 'msgspec', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exports():
    import octavo

    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert set(octavo.__all__) <= set(dir(octavo))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = octavo.no_such_name
