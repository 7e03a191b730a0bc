"""Every file in examples/ runs as its first lines say, and prints what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "long_context.py": ["rtx4090", "32768", "slowdown", "out of reach"],
    "fit_llama.py": ["budget", "equal bit for bit", "losses"],
    "plan_without_gpu.py": ["h100-80gb", "slowdown"],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_it_runs(name: str) -> None:
    path = EXAMPLES / name
    text = path.read_text()
    assert f"python examples/{name}" in text
    assert len(text.splitlines()) < 80
    run = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    for part in PRINTED[name]:
        assert part in run.stdout
