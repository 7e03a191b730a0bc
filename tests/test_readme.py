"""Every Python block of the README runs, in order, in one namespace; every command it names exists."""

import json
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_python_blocks_run(capsys):
    text = README.read_text()
    namespace = {"__name__": "readme"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(
            compile("\n" * line + block[1], str(README), "exec"), namespace
        )  # errors show the README's lines
    assert capsys.readouterr().out


def test_the_quick_start_is_ten_lines():
    first = BLOCK.search(README.read_text())[1]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


def test_commands_exist():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


WORKLOADS = {
    "Llama 1.3B": "llama-1.3b", "GPT-2 774M": "gpt2-774m", "ViT-L/16": "vit-l16", "ViT-B/16": "vit-b16",
    "ResNet-152": "resnet-152", "Qwen3-MoE": "moe", "video DiT": "video-dit",
    "launch-bound Llama": "launch-bound", "LLaMA-7B": "llama-7b",
}  # fmt: skip
LATER = ("gpt2-774m", "vit-l16", "vit-b16", "llama-7b")  # whose eager rows are of frontier-eager.json
AT = re.compile(r"(\d+\.\d{3}) at (\d\.\d{3})")
HIGHER = 1.2  # the fastest other way may peak so many times above the budget


def headline() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Workload, mode, and (time, peak) of every cell of the table of what was measured."""
    rows = []
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        workload, _, mode = cells[0].strip("| ").partition(", ")
        if len(cells) == 7 and workload in WORKLOADS:
            rows.append((WORKLOADS[workload], mode, [AT.search(cell).groups() for cell in cells[1:]]))
    return rows


def test_the_table_of_what_was_measured_is_that_of_the_result_file():
    folder = README.parent / "benchmarks/results"
    results, later = (
        json.loads((folder / name).read_text())["workloads"]
        for name in ("frontier.json", "frontier-eager.json")
    )
    table = headline()
    assert {workload for workload, _, _ in table} == set(WORKLOADS.values()) == {*results, *LATER}
    for workload, mode, cells in table:
        found = later if mode == "eager" and workload in LATER else results
        rows = [row for row in found[workload]["rows"] if row.get("time") is not None]
        rows = [row for row in rows if row["compiled"] == (mode == "compiled") and row["group"] != "plain"]

        def said(row):
            return f"{row['time']:.3f}", f"{row['share']:.3f}"

        ours, peers = [r for r in rows if r["ours"]], [r for r in rows if not r["ours"]]
        for budget, own, other in ((0.5, *cells[:2]), (0.25, *cells[2:4])):
            assert own in map(said, ours), (workload, mode)
            assert float(own[1]) <= budget
            beside = [row for row in peers if row["share"] <= HIGHER * budget]
            assert other == said(min(beside, key=lambda row: row["time"])), (workload, mode, budget)
        for own, others in zip(cells[4:], (ours, peers), strict=True):
            least = min(row["share"] for row in others)
            alike = [said(row) for row in others if row["share"] <= least + 5e-4]
            assert own in alike, (workload, mode, alike)
