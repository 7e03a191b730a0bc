"""Every file in examples/ runs as its first lines say, and prints what it promises."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "long_context.py": ["rtx4090", "32768", "slowdown", "out of reach"],
    "fit_llama.py": ["budget", "equal bit for bit", "losses"],
    "plan_without_gpu.py": ["h100-80gb", "slowdown"],
    "transformers_trainer.py": ["equal bit for bit", "the same losses as without remat: True"],
    "lora.py": ["equal bit for bit", "adapters without a gradient: none"],
    "diffusion_transformer.py": ["offload: activation peak", "equal bit for bit", "loss"],
    "robot_policy.py": ["equal bit for bit", "vision_tower.layers.0", "joint layer 0"],
    "lightning_module.py": ["equal bit for bit", "loss"],
    "ddp.py": ["equal bit for bit", "rank 0: loss", "rank 1: loss"],
    "fsdp2.py": ["equal bit for bit", "rank 0: loss", "rank 1: loss"],
    "resnet.py": ["equal bit for bit", "batches that the statistics have seen: 3"],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


# These start processes of their own, or leave to theirs what trainers keep in global state.
ALONE = ("ddp.py", "fsdp2.py", "transformers_trainer.py", "lightning_module.py")


SLOW = ("long_context.py",)  # test_docs.py plans its model from the command line


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PRINTED]
)
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / name
    text = path.read_text()
    assert f"python examples/{name}" in text
    assert len(text.splitlines()) < 80
    printed = _run_alone(path) if name in ALONE else _run_here(path, capsys)
    for part in PRINTED[name]:
        assert part in printed


def _run_alone(path: Path) -> str:
    run = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _run_here(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """As __main__, but without importing everything once more."""
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out
