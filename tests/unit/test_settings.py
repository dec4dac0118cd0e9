from __future__ import annotations

import logging
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from attention_autotuner import settings
from attention_autotuner.core.user_cache import default_cache_dir
from attention_autotuner.errors import SettingsError
from attention_autotuner.settings import PREFIX, TABLE, Settings, from_environment
from tests.conftest import REPOSITORY
from tests.snippets.settings_table import markdown_table


def test_every_setting_has_a_variable_of_its_own() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    read = from_environment({"HOME": "/nowhere", PREFIX + "JOBS": "  "})
    assert (read.mode, read.effort, read.log_level) == ("cached", "quick", "warning")
    assert read.budget_seconds is None
    assert read.jobs is None
    assert not read.always_tune
    assert not read.strict_versions
    assert not read.print_tuning
    assert read.cache_dir.is_absolute()


def test_every_variable_reaches_its_field(tmp_path: Path) -> None:
    read = from_environment(
        {
            PREFIX + "MODE": "TUNE",
            PREFIX + "EFFORT": "full",
            PREFIX + "BUDGET_SECONDS": "12.5",
            PREFIX + "ALWAYS_TUNE": "yes",
            PREFIX + "STRICT_VERSIONS": "1",
            PREFIX + "LOG_LEVEL": "Debug",
            PREFIX + "PRINT": "on",
            PREFIX + "CACHE_DIR": str(tmp_path),
            PREFIX + "JOBS": "3",
            PREFIX + "CUTLASS_DIR": str(tmp_path / "cutlass"),
            PREFIX + "NVCC": str(tmp_path / "nvcc"),
            PREFIX + "BUNDLE": str(tmp_path / "bundle"),
            PREFIX + "TRUST_OWNERS": "root, 1234",
        }
    )
    assert read == Settings(
        mode="tune",
        effort="full",
        budget_seconds=12.5,
        always_tune=True,
        strict_versions=True,
        log_level="debug",
        print_tuning=True,
        cache_dir=tmp_path,
        jobs=3,
        cutlass_dir=tmp_path / "cutlass",
        nvcc=tmp_path / "nvcc",
        bundle=tmp_path / "bundle",
        trust_owners=(0, 1234),
    )


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("MODE", "sometimes", "off, cached, tune or frozen"),
        ("EFFORT", "max", "none, quick or full"),
        ("BUDGET_SECONDS", "soon", "a positive number of seconds"),
        ("BUDGET_SECONDS", "0", "a positive number of seconds"),
        ("BUDGET_SECONDS", "nan", "a positive number of seconds"),
        ("BUDGET_SECONDS", "inf", "a positive number of seconds"),
        ("ALWAYS_TUNE", "maybe", "1, true"),
        ("LOG_LEVEL", "loud", "debug, info"),
        ("JOBS", "0", "a positive integer"),
        ("JOBS", "2.5", "a positive integer"),
        ("JOBS", "-1", "a positive integer"),
        ("TRUST_OWNERS", "no such user", "names or numbers of users"),
        ("TRUST_OWNERS", "-1", "names or numbers of users"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({PREFIX + variable: value})
    assert PREFIX + variable in str(caught.value)
    assert repr(value) in str(caught.value)
    assert allowed in str(caught.value)


def test_a_misspelt_variable_is_an_error_that_suggests_the_right_one() -> None:
    with pytest.raises(SettingsError, match="did you mean ATTENTION_AUTOTUNER_CACHE_DIR"):
        from_environment({PREFIX + "CACHEDIR": "/tmp/x"})


def test_settings_are_frozen_and_checked_when_made_directly() -> None:
    with pytest.raises(FrozenInstanceError):
        settings.current().mode = "off"  # type: ignore[misc]  # that it cannot be assigned is the point
    with pytest.raises(SettingsError, match="jobs=0"):
        Settings(jobs=0)
    with pytest.raises(SettingsError, match="jobs=True"):
        Settings(jobs=True)


def test_override_nests_restores_and_validates(tmp_path: Path) -> None:
    before = settings.current()
    with settings.override(mode="off", cache_dir=str(tmp_path)):
        assert settings.current().mode == "off"
        assert settings.current().cache_dir == tmp_path
        with settings.override(jobs=7):
            assert (settings.current().mode, settings.current().jobs) == ("off", 7)
        assert settings.current().jobs == before.jobs
    assert settings.current() == before
    with pytest.raises(SettingsError, match="no setting 'job'"), settings.override(job=1):
        pass
    with pytest.raises(SettingsError, match="mode='never'"), settings.override(mode="never"):
        pass
    assert settings.current() == before


def test_override_restores_after_an_exception() -> None:
    before = settings.current()
    with pytest.raises(KeyError), settings.override(mode="off"):
        raise KeyError
    assert settings.current() == before


def test_override_does_not_leak_into_other_threads() -> None:
    seen: list[str] = []
    with settings.override(mode="off"):
        thread = threading.Thread(target=lambda: seen.append(settings.current().mode))
        thread.start()
        thread.join()
    assert seen == [settings.current().mode]


def test_adopted_settings_are_the_very_object_and_end_with_the_block() -> None:
    before = settings.current()
    with settings.override(mode="off") as outer:
        pass
    seen: list[settings.Settings] = []

    def work() -> None:
        with settings.adopted(outer):
            seen.append(settings.current())
        seen.append(settings.current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] is outer
    assert seen[1] is settings.current() is before


def test_reload_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.current()
    monkeypatch.setenv(PREFIX + "JOBS", "5")
    assert settings.reload().jobs == 5
    monkeypatch.delenv(PREFIX + "JOBS")
    assert settings.reload().jobs is None


def test_the_documented_table_names_every_variable() -> None:
    text = markdown_table()
    for row in TABLE:
        assert f"`{row.name}`" in text


LOGGING_PROGRAM = """
import logging
from attention_autotuner import settings
{setup}
settings.current()
logging.getLogger("attention_autotuner.x").info("hello from inside")
"""


@pytest.mark.parametrize(
    ("setup", "level", "times"),
    [
        ("", "info", 1),
        ("", "warning", 0),
        ("logging.basicConfig(level=logging.DEBUG)", "info", 1),
        (
            "logging.getLogger('attention_autotuner').addHandler(logging.StreamHandler())",
            "info",
            1,
        ),
    ],
)
def test_a_message_is_shown_once_whatever_set_logging_up(
    setup: str, level: str, times: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGGING_PROGRAM.format(setup=setup)],
        env={PREFIX + "LOG_LEVEL": level, PREFIX + "CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("hello from inside") == times


def test_override_of_the_log_level_is_undone() -> None:
    logger = logging.getLogger("attention_autotuner")
    settings.current()
    level = logger.level
    with settings.override(log_level="debug"):
        assert logger.level == logging.DEBUG
    assert logger.level == level


@pytest.mark.parametrize("base", ["/somewhere/caches", ""])
def test_the_default_cache_is_the_same_without_platformdirs(
    monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    with_it = default_cache_dir()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert default_cache_dir() == with_it


def test_override_takes_what_variables_take() -> None:
    texts = {"trust_owners": "root", "strict_picks": "yes", "jobs": "2", "budget_seconds": "1.5"}
    with settings.override(**texts, mode="OFF") as now:
        assert now.trust_owners == (0,)
        assert now.strict_picks is True
        assert (now.jobs, now.budget_seconds, now.mode) == (2, 1.5, "off")


def test_the_page_names_the_field_that_is_called_otherwise_than_its_variable() -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")
    for setting in TABLE:
        if setting.field != setting.variable.lower():
            assert f"that of `{setting.name}` is `{setting.field}`" in page
