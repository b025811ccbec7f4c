"""The same tools driven by a language model, over the real client and wire format."""

import json
import re
from pathlib import Path

import anyio
import pytest

from perdure.demo.main import Request, run_demo
from perdure.demo.sample import write_sample
from perdure.demo.timeline import Timeline
from perdure.testing import openai_stub as stub
from tests.demo.independent import falling

WEEKS = {"region": "France", "before": "2011-11-14", "after": "2011-11-21"}


async def publish(exchange: stub.Exchange) -> None:
    """Publish the report whose id the conversation holds."""
    found = re.findall(r"[0-9a-f]{64}", json.dumps(exchange.body["messages"]))
    args = json.dumps({"report": found[-1], "name": "france"})
    await stub.call_tools(("publish_report", args))(exchange)


async def test_a_model_reaches_the_same_figures_through_the_same_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    count = json.dumps({"sql": "SELECT count(*) FROM sale WHERE country = 'France'"})
    script = (
        stub.call_tools(("load_sales", "{}")),
        stub.call_tools(("full_weeks", "{}"), ("sales_schema", "{}"), ("query_sales", count)),
        stub.call_tools(("query_sales", '{"sql": "DROP TABLE sale"}')),
        stub.call_tools(("falling_products", json.dumps(WEEKS))),
        stub.call_tools(("write_report", json.dumps(WEEKS))),
        publish,
        stub.reply("Postage fell most."),
    )
    with anyio.fail_after(15):
        async with stub.openai_stub(*script) as server:
            outcome = await run_demo(
                Request(
                    data=None,
                    region="France",
                    model="m",
                    base_url=server.base_url,
                    yes=True,
                    json=True,
                    crash=False,
                    no_input=False,
                ),
                Timeline(),
            )
    write_sample(tmp_path / "sales.csv")
    wanted = [product.__dict__ for product in falling(tmp_path / "sales.csv", "France")]
    assert outcome.document()["products"] == wanted
    assert (outcome.run.answer, outcome.publications) == ("Postage fell most.", 1)
    refused = [call for call in outcome.calls if call.error is not None]
    assert [call.tool for call in refused] == ["query_sales"]
