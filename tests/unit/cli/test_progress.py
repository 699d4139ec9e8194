"""The progress bar."""

import io
import sys

from kvoffload.cli.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_steps_and_note(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with progress_bar("serving", 2) as advance:
        advance("hits 10 %")
        advance("hits 20 %")
    shown = sys.stderr.getvalue()
    assert "serving" in shown
    assert "2/2" in shown
    assert "hits 20 %" in shown


def test_a_pipe_shows_nothing(capsys):
    with progress_bar("serving", 2) as advance:
        advance("hits 10 %")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
