"""The HTTP API as an impatient client uses it: some server that answers, again and again.

A request that was not answered is sent again, to any server, under the same key. Only what a
server says for a reason comes back; a 5xx that does not mean "not now" is a finding.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import anyio
import httpx2

from perdure.testing.chaos.report import Record

ANSWER_S = 10.0
"""What a server may take to answer; then another one is asked."""

AGAIN_S = 0.3

_LATER = frozenset({429, 503, 507})
"""Statuses that say: not now. 507 is a full disk."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    status: int
    body: dict[str, Any]
    replayed: bool

    @property
    def is_ok(self) -> bool:
        """Tell whether the request was carried out."""
        return 200 <= self.status < 300


class Api:
    """All servers of a campaign. Enter `http` before the first request, and name the `ports`."""

    def __init__(self, record: Record) -> None:
        limits = httpx2.Limits(max_connections=200, max_keepalive_connections=50)
        self.http = httpx2.AsyncClient(limits=limits)
        self.ports: list[int] = []
        self._record = record

    async def request(
        self,
        method: str,
        path: str,
        chance: random.Random,
        *,
        key: str | None = None,
        body: object = None,
        query: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request until somebody answers it."""
        headers = {"Accept": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        while True:
            url = f"http://127.0.0.1:{chance.choice(self.ports)}/v1{path}"
            answer = await self._once(method, url, headers, body, query)
            if answer is not None:
                return answer
            await anyio.sleep(AGAIN_S * (0.5 + chance.random()))

    async def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: object,
        query: Mapping[str, str] | None,
    ) -> Reply | None:
        """Send a request once; None when nothing came of it."""
        try:
            answer = await self.http.request(
                method, url, headers=dict(headers), json=body, params=query, timeout=ANSWER_S
            )
        except httpx2.TransportError as error:
            self._record.count("requests", f"no answer: {type(error).__name__}")
            return None
        self._record.count("requests", f"{method} {answer.status_code}")
        if answer.status_code in _LATER:
            return None
        if answer.status_code >= 500:
            self._record.found("http", f"{method} {url}: {answer.status_code} {answer.text[:1000]}")
            return None
        replayed = answer.headers.get("Idempotency-Replayed") == "true"
        return Reply(answer.status_code, cast("dict[str, Any]", answer.json()), replayed)
