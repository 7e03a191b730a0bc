"""The documentation: it builds without a warning, every Python block and every command in it runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from commands import remat as command

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEMO = "remat demo"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def commands() -> list[str]:
    """Every command line of README and docs, once, in the order in which a reader meets them."""
    pages = [ROOT / "README.md", ROOT / "docs" / "quick-start.md", *DOCS]
    lines = [
        line for page in pages for block in SHELL.finditer(page.read_text()) for line in block[1].splitlines()
    ]
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


@pytest.mark.parametrize(
    "page", [page for page in DOCS if PYTHON.search(page.read_text())], ids=lambda p: p.stem
)
def test_every_python_block_runs(page, tmp_path, monkeypatch, capsys):
    """In order, in one namespace, where `model`, `batch` and `loss` are as any reader has them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "remat": remat,
        "model": nn.Sequential(*(Block() for _ in range(4))),
        "batch": torch.randn(8, 8, 16),
        "loss": lambda output, batch: output.square().mean(),
    }
    text = page.read_text()
    for block in PYTHON.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), names)  # errors show the page's lines


def test_every_command_runs(tmp_path, monkeypatch):
    """In one folder, one after the other: a later one may read what an earlier one wrote."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    found = commands()
    shown = {line.split()[1] for line in found}
    assert shown == {"bench", "compare", "demo", "devices", "doctor", "explain", "plan"}
    assert DEMO in found
    for line in found:
        assert line.startswith("remat "), (
            f"{line!r}: only remat's own commands are run here; use a text block"
        )
        if line != DEMO:
            run_line(line)
    assert (tmp_path / "plan.html").stat().st_size < 6_000_000


@pytest.mark.slow  # a minute; test_demo.py has it on a smaller model
def test_the_demo_runs():
    assert run_line(DEMO).count("yes") >= 2  # the same gradients, with `fit` and with `enable`


def run_line(line):
    ran = command(*shlex.split(line)[1:])
    assert ran.code == 0, f"{line}\n{ran.err}"
    assert ran.out.strip(), line
    return ran.out


def test_a_7b_model_is_planned_without_an_accelerator(tmp_path):
    """Within a minute of this process's time and 4 GiB."""
    (tmp_path / "seven.py").write_text(
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "def build():\n"
        "    tokens = torch.zeros(1, 4096, dtype=torch.long)\n"
        "    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096))\n"
        "    return model, {'input_ids': tokens, 'labels': tokens}\n"
    )
    watched = (
        "import resource, sys\nsys.argv = ['remat', 'plan', 'seven.py:build', '--budget', '32GiB', "
        "'--device', 'h100-80gb', '--dtype', 'bf16', '--json', '--out', 'plan.json', '--html', 'plan.html']\n"
        "from remat.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", watched],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    parameters = report["step_bytes"]["parameters"]
    assert 13e9 < parameters < 14e9  # 6.7e9 parameters in bfloat16
    assert report["predicted_peak_bytes"] <= 32 * 2**30 < report["plain_peak_bytes"]
    seconds, nbytes = map(float, done.stderr.strip().splitlines()[-1].split())
    assert seconds < 60
    assert nbytes < 4 * 2**30


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_a_warning(site):
    pages = {path.parent.name for path in site.glob("*/index.html")}
    assert {page.stem for page in DOCS} - {"index"} <= pages
    assert (site / "pictures" / "frontier-llama-1.3b-light.svg").exists()


def test_every_public_name_is_in_the_reference(site):
    text = (site / "api" / "index.html").read_text()
    for name in remat.__all__:
        place = f"{getattr(remat, name).__module__}.{name}"
        assert f'id="{place}"' in text, f"add `::: {place}` to docs/api.md"


def test_the_site_asks_nothing_of_the_network(site):
    text = (site / "index.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?://[^\"]+)\"", text)
    assert [url for url in loaded if "canonical" not in url] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_shows_the_recorded_figures(scheme):
    picture = (ROOT / "docs" / "pictures" / f"frontier-llama-1.3b-{scheme}.svg").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text())
    found = results["workloads"]["llama-1.3b"]
    ours = [row for row in found["rows"] if row["ours"] and row.get("time") is not None]
    shown = [f"{row['time']:.2f}" for row in ours if f">{row['time']:.2f}<" in picture]
    assert len(shown) >= 12, "run benchmarks/plot.py"
    assert f"{found['environment']['device']}, torch" in picture
    assert found["environment"]["date"][:10] in picture


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_source_file_is_in_the_map_of_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = [path.name for path in (ROOT / "src" / "remat").rglob("*.py") if path.name != "__init__.py"]
    assert not [name for name in files if not re.search(rf"(^|\s){re.escape(name)}\s", text, re.MULTILINE)]
    named = set(re.findall(r"^\s+(\w+\.py)\s", text.split("## Where things are")[1], re.MULTILINE))
    assert not named - {*files, "__init__.py"}
