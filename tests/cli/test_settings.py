"""Where settings come from, and which goes before which."""

import json
from pathlib import Path

import pytest

from perdure.ops.settings import Settings, load_settings, masked_url
from perdure.protocol.errors import Invalid
from perdure.runtime import engine_settings
from tests.cli.program import Program


def sources(program: Program, *words: str) -> dict[str, dict[str, object]]:
    """Return the settings with their sources."""
    return program("config", "show", "--sources", "--json", *words).json


def write_files(folder: Path) -> None:
    """Write a project's and a person's file with different ports."""
    (folder / "config" / "perdure").mkdir(parents=True)
    personal = folder / "config" / "perdure" / "config.toml"
    personal.write_text("[server]\nport = 1111\nhost = '127.0.0.2'\n[log]\nlevel = 'debug'\n")
    (folder / "perdure.toml").write_text("[server]\nport = 2222\n")


def test_nearer_sources_go_before_farther_ones(perdure: Program) -> None:
    assert sources(perdure)["server.port"] == {"source": "default", "value": 8733}
    write_files(perdure.folder)
    found = sources(perdure)
    assert found["server.port"] == {"source": "./perdure.toml", "value": 2222}
    assert found["server.host"]["value"] == "127.0.0.2"
    assert str(found["log.level"]["source"]).endswith("config.toml")
    perdure.patch.setenv("PERDURE_SERVER__PORT", "3333")
    assert sources(perdure)["server.port"] == {"source": "environment", "value": 3333}
    perdure.patch.setenv("PERDURE_DB__URL", "sqlite:///other.db")
    assert sources(perdure, "--db", "sqlite:///mine.db")["db.url"]["source"] == "flag"


def test_the_project_file_may_be_pyproject(perdure: Program) -> None:
    (perdure.folder / "pyproject.toml").write_text(
        "[project]\nname='x'\n[tool.perdure]\nagents=['a:b']\n"
    )
    assert sources(perdure)["agents"] == {"source": "./pyproject.toml", "value": ["a:b"]}


def test_lists_in_the_environment_are_separated_by_commas(perdure: Program) -> None:
    perdure.patch.setenv("PERDURE_AGENTS", "a.b:c, d:e")
    perdure.patch.setenv("PERDURE_WORKER__QUEUES", "default, gpu.1")
    assert load_settings().agents == ("a.b:c", "d:e")
    assert load_settings().worker.queues == ("default", "gpu.1")
    assert engine_settings(load_settings()).queues == ("default", "gpu.1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nport = 'x'", "server.port (./perdure.toml)"),
        ("[server]\nprot = 1", "server.prot (./perdure.toml)"),
        ("[worker]\nlease_ttl_s = 2\nheartbeat_s = 1.5", "heartbeat_s"),
        ("[server", "perdure.toml"),
        ("[worker]\nqueues = []", "worker.queues"),
        ("[worker]\nqueues = ['a b']", "worker.queues.0 (./perdure.toml)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_source(perdure: Program, text: str, named: str) -> None:
    (perdure.folder / "perdure.toml").write_text(text)
    done = perdure("config", "show")
    assert (done.code, done.out) == (2, "")
    assert named in done.err


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PERDURE_DB_URL", "sqlite:///x", "PERDURE_DB__URL"),
        ("PERDURE_WORKR__RUNS_MAX", "3", "PERDURE_WORKR__RUNS_MAX"),
    ],
)
def test_a_misspelt_name_in_the_environment_is_refused(
    perdure: Program, name: str, value: str, told: str
) -> None:
    perdure.patch.setenv(name, value)
    done = perdure("config", "show")
    assert (done.code, done.out) == (2, "")
    assert told in done.err


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_what_a_container_platform_puts_into_the_environment_is_let_be(
    perdure: Program, protocol: str
) -> None:
    perdure.patch.setenv("PERDURE_SERVER_PORT", f"{protocol}://10.0.0.1:80")
    perdure.patch.setenv("PERDURE_SERVICE_HOST", "10.0.0.1")
    assert perdure("config", "show").code == 0


def test_passwords_are_not_shown(perdure: Program) -> None:
    url = "postgresql://me:secret@host/db?password=secret2&x=1"
    assert masked_url(url) == "postgresql://me:***@host/db?password=***&x=1"
    shown = perdure("config", "show", "--json", "--db", url)
    assert "secret" not in shown.out


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:sec@ret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:sec/ret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:sec?ret@host:5432/db", "postgresql://me:***@host:5432/db"),
        (
            "postgresql://me@host/db?a=1&sslpassword=secret&PassWord=x@y&b=2",
            "postgresql://me@host/db?a=1&sslpassword=***&PassWord=***&b=2",
        ),
        ("postgresql://host:5432/db?a=1", "postgresql://host:5432/db?a=1"),
        ("sqlite:////tmp/a:b/perdure.db", "sqlite:////tmp/a:b/perdure.db"),
    ],
)
def test_no_part_of_a_password_is_shown_however_it_is_written(url: str, shown: str) -> None:
    """R-21.2: a raw @, / or ? in it, and every parameter that has to do with one."""
    assert masked_url(url) == shown


def test_defaults_made_directly_ignore_the_environment(perdure: Program) -> None:
    perdure.patch.setenv("PERDURE_SERVER__PORT", "3333")
    assert Settings().server.port == 8733
    with pytest.raises(Invalid):
        load_settings({"signals": "smoke"})
    assert json.loads(perdure("config", "show", "--json").out)["server.port"] == 3333
