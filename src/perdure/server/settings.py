"""How the API server is bound and limited. Seconds and bytes, as the names say."""

from dataclasses import dataclass

from perdure.protocol.values import BODY_BYTES_MAX, SSE_BUFFER_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the API server.

    `allowed_hosts` are Host names accepted beside the loopback ones ("*": any, for a server
    behind a proxy that checks them); `allowed_origins` are origins whose pages may send mutating
    requests beside the server's own. `insecure` lets a server without authentication listen on
    an address that is not loopback.
    """

    host: str = "127.0.0.1"
    port: int = 8733
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    body_bytes_max: int = BODY_BYTES_MAX
    body_timeout_s: float = 60.0
    sse_heartbeat_s: float = 15.0
    sse_retry_ms: int = 2000
    sse_stall_s: float = 30.0
    sse_buffer_bytes_max: int = SSE_BUFFER_BYTES_MAX
    shutdown_grace_s: float = 10.0
    access_log: bool = True
