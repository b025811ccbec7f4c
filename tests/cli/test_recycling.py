"""A server whose tools never come back starts afresh, as a worker does (F40)."""

from pathlib import Path

import anyio
import pytest

from perdure.cli import recycling
from perdure.cli.serve import _serve  # pyright: ignore[reportPrivateUsage] - its end is looked at
from perdure.ops.settings import Settings
from perdure.tools.runner import LocalToolRunner


async def test_a_server_with_too_many_lost_slots_stops_in_order_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-5.8: `serve` heeds what `worker` does; then its command takes its own place."""
    monkeypatch.setattr(recycling, "LOOK_S", 0.05)
    monkeypatch.setattr(LocalToolRunner, "wants_recycle", True)
    settings = Settings.model_validate(
        {"db": {"url": f"sqlite:///{tmp_path / 'perdure.db'}"}, "server": {"port": 0}}
    )
    with anyio.fail_after(30):
        asked, is_lost = await _serve(settings, with_worker=True, json=False)
    assert (asked.number, is_lost) == (0, True)
