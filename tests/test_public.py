"""The public interface: exactly these names, and each of them is there."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remat


def test_all_is_sorted_and_complete():
    assert remat.__all__ == sorted(remat.__all__)
    assert set(remat.__all__) == set(remat._EXPORTS)
    assert set(remat.__all__) <= set(dir(remat))


@pytest.mark.parametrize("name", remat.__all__)
def test_every_name_is_there_and_says_what_it_does(name):
    value = getattr(remat, name)
    assert value.__doc__
    assert inspect.isclass(value) or callable(value)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(remat.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in guard.body for alias in node.names}
    assert seen == remat._EXPORTS


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'remat' has no attribute 'fti'"):
        remat.fti  # noqa: B018


ROOT = Path(__file__).parents[1]
NAMED = sorted(
    {
        name
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for name in re.findall(r"\bremat(?:\.[a-z_]+\b(?!\.json|/))+", page.read_text())
    }
)


def test_every_name_in_the_documentation_is_found_after_import_remat():
    code = f"""
import remat, sys
assert "torch" not in sys.modules
for name in {NAMED!r}:
    found = remat
    for part in name.split(".")[1:]:
        found = getattr(found, part)
"""
    assert {"remat.ranks.alone", "remat.show.scalars.scalars_of", "remat.planner.strategies"} <= set(NAMED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in remat.__all__ if name.endswith("Error")])
def test_every_error_is_a_remat_error(name):
    assert issubclass(getattr(remat, name), remat.RematError)


def test_the_version_is_the_package_version():
    from importlib.metadata import version

    assert remat.__version__ == version("remat")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"]])
def test_command_line(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "remat", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
