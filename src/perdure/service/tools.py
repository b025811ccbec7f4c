"""Tools as they are listed (R-1.7): from the rows that workers register."""

from itertools import groupby

from perdure.protocol.tools import read_spec
from perdure.service.base import Service
from perdure.service.principal import Principal
from perdure.service.views import ToolView
from perdure.store.reader import RegisteredTool


async def list_tools(service: Service, principal: Principal) -> list[ToolView]:
    """Return every registered tool with its newest declaration, by name."""
    del principal  # every tenant may see every tool until authentication lands
    registered = await service.reader.list_tools()
    grouped = groupby(registered, key=lambda row: row.name)
    views = [_view(list(versions)) for _, versions in grouped]
    return [view for view in views if view is not None]


def _view(rows: list[RegisteredTool]) -> ToolView | None:
    """Return a tool's view; None for a declaration that this release cannot read."""
    newest = rows[-1]
    spec = read_spec(newest.spec)
    if spec is None:
        return None
    return ToolView.model_construct(
        name=spec.name,
        version=newest.version,
        versions=[row.version for row in rows],
        description=spec.description,
        input_schema=spec.input_schema,
        output_schema=spec.output_schema,
        side_effect=spec.side_effect,
        idempotent=spec.idempotent,
        has_lookup=spec.has_lookup,
        has_compensate=spec.has_compensate,
        risk=spec.risk,
        permission=spec.permission,
        timeout_s=spec.timeout_s,
        compensation=spec.compensation,
        sandbox_only=spec.sandbox_only,
        definition_digest=spec.definition_digest,
        registered_at=newest.registered_at,
    )
