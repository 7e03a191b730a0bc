"""Every Python block of the README runs, in order, in one namespace; every command it names exists."""

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
