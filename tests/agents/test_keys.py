"""Keys: from the environment or a private file, never told, never inherited."""

import io
import os
import stat
import sys

import pytest

from autokernel import keys
from autokernel.cli import app, guarded
from autokernel.errors import ConfigError

KEY = "sk-ant-0123456789abcdef"


def cli(*arguments):
    try:
        return guarded(lambda: app(list(arguments), prog_name="autokernel"))
    except SystemExit as end:
        return end.code


@pytest.fixture
def path():
    return keys.keys_path(os.environ)


def test_set_list_remove(monkeypatch, capsys, path):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{KEY}\n"))
    assert cli("keys", "set", "anthropic") == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.available_keys(os.environ) == {"ANTHROPIC_API_KEY": KEY}
    assert cli("keys", "list") == 0
    assert cli("keys", "remove", "anthropic") == 0
    assert keys.available_keys(os.environ) == {}
    told = capsys.readouterr()
    assert "anthropic" in told.out
    assert KEY not in told.out + told.err


@pytest.mark.parametrize(("name", "typed"), [("mistral", KEY), ("openai", ""), ("openai", "two words")])
def test_what_is_no_key_is_refused(monkeypatch, capsys, path, name, typed):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert cli("keys", "set", name) == 2
    assert "hint:" in capsys.readouterr().err
    assert not path.exists()


def test_file_that_others_can_read_is_refused_with_the_mend(path):
    keys.store_keys(path, {"openai": KEY})
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640") as caught:
        keys.available_keys(os.environ)
    assert f"chmod 600 {path}" in caught.value.hint


@pytest.mark.parametrize("content", ["[]", '{"openai": 1}', f"{KEY} not json"])
def test_damaged_file_is_refused_without_quoting_it(path, content):
    keys.store_keys(path, {})
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        keys.stored_keys(path)
    assert KEY not in str(caught.value)


def test_environment_comes_first_and_is_withheld_while_a_run_is_open(path):
    keys.store_keys(path, {"openai": "sk-stored-0123456789", "anthropic": KEY})
    environ = {"OPENAI_API_KEY": "sk-environ-0123456789", "XDG_CONFIG_HOME": str(path.parents[1]), "HOME": "/"}
    with keys.withheld(environ) as found:
        assert found == {"OPENAI_API_KEY": "sk-environ-0123456789", "ANTHROPIC_API_KEY": KEY}
        assert "OPENAI_API_KEY" not in environ
    assert environ["OPENAI_API_KEY"] == "sk-environ-0123456789"


def test_redact():
    assert keys.redact(f"bad {KEY}.", [KEY, ""]) == "bad [key]."
    assert keys.redact("none of it", ["none"]) == "none of it"
