"""What is printed: sizes, cells, tables that lose nothing, the Ready block."""

import json
import shlex

import pytest

from hetero_llm.cli import render
from hetero_llm.cli.ready import ReadyInfo, ready_data, ready_lines

LONG = "a reason with " + "very " * 60 + "many words"
TABLE = render.Table(("name", "reason"), (("x", LONG), (None, "tab\there")))


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [(None, None), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (80 << 30, "80.0 GiB"), (3 << 50, "3072.0 TiB")],
)
def test_sizes_have_binary_units_and_unmeasured_stays_unmeasured(count_bytes, text):
    assert render.size(count_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0"), ((), "-"), ((1, 2), "1,2"), (True, "yes"), (False, "no"), ("", "")]
)
def test_cells_tell_unmeasured_from_zero(value, text):
    assert render.cell(value) == text


def test_a_table_in_a_file_is_wide_and_loses_no_text(capsys):
    render.show(render.Format.TABLE, {}, TABLE)
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) > 100
    assert " ".join(" ".join(line.split()) for line in out.splitlines()).count("very") == 60
    assert "\x1b" not in out


def test_a_narrow_terminal_folds_instead_of_cutting(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    render.show(render.Format.TABLE, {}, TABLE)
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 40
    assert out.count("very") == 60


def test_no_color_turns_colours_off_even_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    render.stdout_console().print("[red]x[/red]")
    assert "\x1b[31m" not in capsys.readouterr().out


def test_plain_rows_stay_one_line_each(capsys):
    render.show(render.Format.PLAIN, {}, TABLE)
    assert capsys.readouterr().out.splitlines()[2] == "-\ttab here"


def test_an_empty_table_says_so_on_stderr(capsys):
    render.show(render.Format.TABLE, {}, render.Table(("a",), (), empty="none here"))
    assert capsys.readouterr() == ("", "none here\n")


def test_talk_to_a_closed_terminal_is_dropped(monkeypatch):
    class Gone:
        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    render.say("bye")


def info(**changes):
    fields = {"url": "http://127.0.0.1:8000", "models": {"m": "1 x cpu tp=1"}, "has_keys": False, "seconds": 41.26}
    return ReadyInfo(**{**fields, "pid": 7, **changes})


def test_the_ready_block_has_all_one_needs():
    text = "\n".join(ready_lines(info()))
    for part in ("http://127.0.0.1:8000", "m (1 x cpu tp=1)", "curl", "OPENAI_BASE_URL=http://127.0.0.1:8000/v1"):
        assert part in text
    for part in ("/docs", "/metrics", "--api-keys", "Ctrl-C", "hetero-llm stop --all"):
        assert part in text


def test_the_curl_line_can_be_pasted_into_a_shell():
    (line,) = (line for line in ready_lines(info(models={"it's": None})) if "curl" in line)
    words = shlex.split(line.split(maxsplit=1)[1])
    assert words[0] == "curl"
    assert json.loads(words[-1])["model"] == "it's"


def test_the_ready_block_of_an_endpoint_with_keys_shows_where_the_key_goes():
    text = "\n".join(ready_lines(info(has_keys=True)))
    assert "authorization: Bearer <your key>" in text
    assert "OPENAI_API_KEY=<your key>" in text


def test_a_detached_serve_is_not_stopped_by_ctrl_c():
    assert "Ctrl-C" not in "\n".join(ready_lines(info(foreground=False)))


def test_the_ready_block_is_data_too():
    assert ready_data(info())["openai_base_url"] == "http://127.0.0.1:8000/v1"
