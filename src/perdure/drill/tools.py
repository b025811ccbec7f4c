"""Which of an installation's registered tools leave a fault to a person."""

from collections.abc import Iterator

from perdure.drill.report import Lack, ToolGap
from perdure.protocol.states import SideEffect
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.tools import list_tools
from perdure.service.views import ToolView

OURS = "perdure."


async def tools_with_effects(service: Service) -> list[ToolView]:
    """Return the newest version of each registered tool with a side effect, the drill's left out."""
    found = await list_tools(service, LOCAL)
    return [
        item
        for item in found
        if item.side_effect is not SideEffect.READ and not item.name.startswith(OURS)
    ]


def gaps_of(tools: list[ToolView]) -> list[ToolGap]:
    """Return what each tool lacks.

    Idempotency: after a crash nobody can tell whether a call took effect, and it may not be run
    again. Compensation: a cancel cannot undo what it did.
    """
    return list(_gaps(tools))


def _gaps(tools: list[ToolView]) -> Iterator[ToolGap]:
    for item in tools:
        lacks: list[Lack] = []
        if not (item.idempotent or item.has_lookup):
            lacks.append("idempotency")
        if not item.has_compensate:
            lacks.append("compensation")
        if lacks:
            yield ToolGap(
                tool=item.name,
                version=item.version,
                side_effect=item.side_effect,
                lacks=lacks,
                by_hand=item.compensation,
            )
