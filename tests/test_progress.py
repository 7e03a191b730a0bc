"""Progress: shown after a second, on a terminal's error stream only, one line even when calls nest."""

from __future__ import annotations

import rich.console

from remat.show import progress


class Terminal(rich.console.Console):
    @property
    def is_terminal(self) -> bool:
        return True


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    with progress.showing("remat: working") as say:
        say("hard")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_what_is_quick_is_not_shown(monkeypatch, capsys):
    monkeypatch.setattr(rich.console, "Console", Terminal)
    with progress.showing("remat: working") as say:
        say("hardly")
    assert "working" not in capsys.readouterr().err


def test_one_line_even_if_nested(monkeypatch, capsys):
    monkeypatch.setattr(rich.console, "Console", Terminal)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", -1.0)
    with progress.showing("remat: measuring") as outer:
        outer("fit 50%")
        with progress.showing("remat: fitting GPT") as inner:
            inner("surveying [regions]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fitting GPT: surveying [regions]" in captured.err
