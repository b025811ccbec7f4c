"""Who calls (R-21.1). Until authentication lands there is one tenant and one principal."""

from dataclasses import dataclass

from perdure.protocol.base import PRINCIPAL_LOCAL, TENANT_DEFAULT
from perdure.protocol.runs import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller and the tenant it acts in."""

    tenant_id: str = TENANT_DEFAULT
    name: str = PRINCIPAL_LOCAL
    roles: tuple[str, ...] = ()

    def as_caller(self) -> Caller:
        """Return what a run records of its caller."""
        return Caller(tenant_id=self.tenant_id, principal=self.name, roles=self.roles)


LOCAL = Principal()
"""The caller of an installation without authentication (decision 41)."""
