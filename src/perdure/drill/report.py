"""What a drill found, for people and for programs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from perdure.ops.output import print_line, print_table
from perdure.protocol.base import Model, Time
from perdure.protocol.states import SideEffect

Verdict = Literal["healed", "person", "failed"]
Lack = Literal["idempotency", "compensation"]


class SceneReport(Model):
    """One scene: `healed` by itself, up to what a `person` has to decide, or `failed`."""

    scene: str
    title: str
    verdict: Verdict
    seconds: float
    healed: list[str] = Field(description="what the runtime did by itself")
    person: list[str] = Field(description="what a person has to decide or do")
    problems: list[str] = Field(description="what did not go as it should")
    run_ids: list[str]
    kept: bool = Field(description="its rows are still there; else they were deleted")


class ToolGap(Model):
    """A registered tool with a side effect, and what it lacks."""

    tool: str
    version: str
    side_effect: SideEffect
    lacks: list[Lack]
    by_hand: str | None = Field(description="what it says of undoing it by hand")


class DrillReport(Model):
    """A whole drill."""

    drill_id: str
    database: str
    tenant: str
    started_at: Time
    finished_at: Time
    scenes: list[SceneReport]
    tools: int = Field(description="registered tools with a side effect")
    gaps: list[ToolGap]

    @property
    def passed(self) -> bool:
        """Tell whether every scene went as it should."""
        return all(scene.verdict != "failed" for scene in self.scenes)


def seconds_between(start: datetime, end: datetime) -> float:
    """Return a time in seconds, to the tenth."""
    return round((end - start).total_seconds(), 1)


def print_report(report: DrillReport) -> None:
    """Print a report as text."""
    rows = [(scene.scene, scene.verdict, scene.seconds) for scene in report.scenes]
    print_table(("SCENE", "RESULT", "SECONDS"), rows)
    _print_part("Healed itself", [(s.scene, text) for s in report.scenes for text in s.healed])
    _print_part("Needs a person", [(s.scene, text) for s in report.scenes for text in s.person])
    _print_part(
        "Did not go as it should", [(s.scene, text) for s in report.scenes for text in s.problems]
    )
    _print_tools(report)


def _print_part(head: str, lines: Sequence[tuple[str, str]]) -> None:
    if not lines:
        return
    print_line("")
    print_line(f"{head}:")
    for scene, text in lines:
        print_line(f"  {scene}: {text}")


def _print_tools(report: DrillReport) -> None:
    print_line("")
    if not report.tools:
        print_line("Tools: no worker has registered one with a side effect.")
        return
    lacking = len(report.gaps)
    print_line(f"Tools with a side effect: {report.tools}, of which {lacking} lack something.")
    rows = [
        (gap.tool, gap.version, gap.side_effect, ", ".join(gap.lacks), gap.by_hand)
        for gap in report.gaps
    ]
    print_table(("TOOL", "VERSION", "EFFECT", "LACKS", "BY HAND"), rows)
