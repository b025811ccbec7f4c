"""An API process for tests: serves a database without a worker; a plan may kill it at a commit.

`python -m tests.server.api_process URL PORT [PLAN]`, the plan as JSON (`perdure.testing.faults`).
"""

import sys
from dataclasses import replace

import anyio

from perdure.ops.settings import DatabaseSettings, ListenSettings, Settings
from perdure.runtime import make_application, open_core
from perdure.server.serve import make_server
from perdure.testing.faults import FaultyStore, Plan, Trap


async def _main(url: str, port: int, plan: Plan | None) -> None:
    settings = Settings(db=DatabaseSettings(url=url), server=ListenSettings(port=port))
    async with open_core(settings) as core:
        faulty = replace(core, store=FaultyStore(core.store, Trap(plan)))
        application = make_application(settings, faulty)
        await make_server(application.app, application.settings, application.stopping).serve()


if __name__ == "__main__":
    given = Plan.model_validate_json(sys.argv[3]) if len(sys.argv) > 3 else None
    anyio.run(_main, sys.argv[1], int(sys.argv[2]), given)
