"""The layering, read from the imports: who may know whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import remat

ROOT = Path(remat.__file__).parent
STDLIB = set(sys.stdlib_module_names)
BASE = {"remat.records", "remat.units", "remat.errors", "remat.codec"}
LATE = {"remat.records": {"remat.show.text"}}  # plan.report() is a convenience: imported inside of it


def imports(path):
    """Every module imported anywhere in a file; relative imports and `from package import module` too."""
    package = ["remat", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                parts = f"{module}.{alias.name}".split(".")
                is_module = module.startswith("remat") and _file(parts) is not None
                yield ".".join(parts) if is_module else module


def _file(parts):
    place = ROOT.joinpath(*parts[1:])
    found = [place / "__init__.py", place.with_suffix(".py")]
    return next((path for path in found if path.exists()), None)


def foreign(path):
    return {name.split(".")[0] for name in imports(path)} - STDLIB - {"remat"}


def ours(path):
    return {name for name in imports(path) if name.split(".")[0] == "remat"}


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def within(name, package):
    return name == package or name.startswith(f"{package}.")


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", sorted(BASE))
def test_the_base_imports_nothing_but_itself(name):
    path = ROOT / f"{name.removeprefix('remat.')}.py"
    assert not foreign(path)
    assert ours(path) <= BASE | {"remat"} | LATE.get(name, set())


@pytest.mark.parametrize("path", files("planner"), ids=ids)
def test_the_planner_knows_no_torch(path):
    assert foreign(path) <= {"numpy", "scipy"}
    assert all(name in BASE or within(name, "remat.planner") for name in ours(path))


@pytest.mark.parametrize("path", [*files("trace"), *files("run"), *files("check")], ids=ids)
def test_the_middle_knows_neither_planner_nor_api(path):
    above = ("remat.planner", "remat.api", "remat.integrations", "remat.cli", "remat.demo", "remat.show")
    assert not [name for name in ours(path) if any(within(name, package) for package in above)]
    assert "remat" not in ours(path)  # the public names are for users: import the module itself


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=ids)
def test_optional_libraries_are_imported_on_demand(path):
    """transformers, diffusers and the like only inside functions, and only in integrations/."""
    required = {"torch", "numpy", "scipy", "rich", "typer"}
    top = {
        name.split(".")[0]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    }
    assert top - STDLIB - {"remat", ""} <= required


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_the_planner_imports_without_torch():
    modules = [".".join(["remat", *p.relative_to(ROOT).with_suffix("").parts]) for p in files("planner")]
    names = [*sorted(BASE), *(m.removesuffix(".__init__") for m in modules)]
    done = run_python(
        "import sys; sys.modules['torch'] = None\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "assert sys.modules['torch'] is None"
    )
    assert done.returncode == 0, done.stderr


def test_a_saved_plan_is_read_without_torch():
    """A report of it, and the commands that show it, start quickly and work where torch is not installed."""
    names = [f"remat.show.{path.stem}" for path in files("show") if path.stem != "__init__"]
    done = run_python(
        "import sys; sys.modules['torch'] = None\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "assert sys.modules['torch'] is None"
    )
    assert done.returncode == 0, done.stderr


def test_import_remat_is_light():
    done = run_python("import remat, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules")
    assert done.returncode == 0, done.stderr
