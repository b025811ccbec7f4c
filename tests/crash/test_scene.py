"""The acceptance scene of R-7.3: killed at every commit boundary, the run ends as if nothing was.

Real processes and SIGKILL, each case in a database of its own. `make test` plays a sample, `make
crash` all of them, four side by side: a test only waits for its case, which a pool plays.
"""

import itertools
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.ops.local_postgres import LocalPostgres
from perdure.testing.scene import Act
from tests.crash.cases import ALL, SAMPLE, Case, StoreName
from tests.crash.playing import Seen, assert_recovered, run_play, run_undisturbed

AT_ONCE = 4

Timed = tuple[Seen, float]
Calm = tuple[StoreName, Act]
"""An undisturbed scene: on which store, and which act."""


def calm(case: Case) -> Calm:
    """Return the undisturbed scene that a case is compared with."""
    return case.store, "code" if case.hook.act == "code" else "pay"


@dataclass(slots=True, kw_only=True)
class Campaign:
    """The cases that are asked for, under way from the start."""

    played: dict[str, Future[Timed]]
    expected: dict[Calm, Future[Timed]]


@pytest.fixture(scope="module")
def campaign(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Campaign]:
    """Play every case that is selected, and the undisturbed scene once on each of their stores."""
    cases = _selected(request.session.items)
    folder = tmp_path_factory.mktemp("crash")
    urls = _Urls(request, folder)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        expected: dict[Calm, Future[Timed]] = {
            (store, act): pool.submit(
                _timed_undisturbed, urls.new(store), folder / f"{store}-{act}-calm", act
            )
            for store, act in {calm(case) for case in cases}
        }
        played = {
            str(case): pool.submit(_timed_play, case, urls.new(case.store), folder / str(case))
            for case in cases
        }
        yield Campaign(played=played, expected=expected)
        pool.shutdown(cancel_futures=True)


def _selected(items: Sequence[pytest.Item]) -> list[Case]:
    found = [getattr(item, "callspec", None) for item in items]
    params = [spec.params.get("case") for spec in found if spec is not None]
    return list({str(case): case for case in params if isinstance(case, Case)}.values())


class _Urls:
    """Names of databases that nobody else uses."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._numbers = itertools.count(1)

    def new(self, store: StoreName) -> str:
        name = f"scene_{next(self._numbers)}"
        if store == "sqlite":
            return f"sqlite:///{self._folder / name}.db"
        server: LocalPostgres = self._request.getfixturevalue("postgres")
        return server.create_database(name)


def _timed_play(case: Case, url: str, folder: Path) -> Timed:
    began = time.monotonic()
    return run_play(case, url, folder), time.monotonic() - began


def _timed_undisturbed(url: str, folder: Path, act: Act) -> Timed:
    began = time.monotonic()
    return run_undisturbed(url, folder, act), time.monotonic() - began


def _check(campaign: Campaign, case: Case, record: pytest.FixtureRequest) -> None:
    seen, took_s = campaign.played[str(case)].result()
    record.node.user_properties.append(("took_s", round(took_s, 1)))
    expected, _ = campaign.expected[calm(case)].result()
    assert expected.findings == []
    assert_recovered(case, seen, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_killed_run_ends_like_an_undisturbed_one(
    campaign: Campaign, case: Case, request: pytest.FixtureRequest
) -> None:
    """R-7.3, F01, F02, F07, F08, F13: a sample of the boundaries."""
    _check(campaign, case, request)


@pytest.mark.crash_full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_run_killed_anywhere_ends_like_an_undisturbed_one(
    campaign: Campaign, case: Case, request: pytest.FixtureRequest
) -> None:
    """R-7.3, F01, F02, F07, F08, F13: every boundary, in every way, on both stores."""
    _check(campaign, case, request)
