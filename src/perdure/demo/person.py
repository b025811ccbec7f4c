"""Asks the person at the terminal, without holding the run: anybody else may answer as well."""

import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass

import anyio
import orjson
from pydantic import JsonValue

from perdure.demo.timeline import Timeline
from perdure.protocol.codec import parse_strict
from perdure.protocol.errors import PerdureError
from perdure.protocol.states import Answer, InterruptKind
from perdure.service.base import Service
from perdure.service.interrupts import AnswerRequest, get_interrupt, resolve
from perdure.service.principal import LOCAL
from perdure.service.views import InterruptView


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """How questions are answered: `yes` approves by itself; `asks` reads from the terminal."""

    timeline: Timeline
    command: str
    yes: bool
    asks: bool

    async def answer(self, service: Service, interrupt_id: str) -> bool:
        """Answer an approval, or show it when somebody else has to answer.

        Returns whether to wait for that: not when the terminal's input is at its end.
        """
        asked = await get_interrupt(service, LOCAL, interrupt_id)
        if self.yes and asked.kind is InterruptKind.APPROVAL:
            await self._resolve(service, interrupt_id, AnswerRequest(answer=Answer.APPROVE))
            return True
        self._show(asked)
        while self.asks and asked.kind is InterruptKind.APPROVAL:
            line = await _read_line()
            if line is None:
                self.timeline.say("nothing can be typed here: the run is left waiting", "")
                return False
            request = self._understand(line, asked)
            if request is not None and await self._resolve(service, interrupt_id, request):
                break
        return True

    def _show(self, asked: InterruptView) -> None:
        say = self.timeline.say
        say("")
        say(f"The agent asks: {asked.title or asked.kind}  {asked.reason}", "bold magenta")
        if asked.action is not None:
            args = orjson.dumps(asked.action.args, option=orjson.OPT_SORT_KEYS).decode()
            say(f"  {asked.action.tool} {args}")
        if self.asks:
            say("  y = approve, n = reject, e {…} = approve with these arguments instead", "")
        say(f"  or, from another terminal: {self.command.format(asked.interrupt_id)}", "")

    def _understand(self, line: str, asked: InterruptView) -> AnswerRequest | None:
        word, _, rest = line.strip().partition(" ")
        match word.lower():
            case "y" | "yes":
                return AnswerRequest(answer=Answer.APPROVE)
            case "n" | "no":
                return AnswerRequest(answer=Answer.REJECT, reason=rest or None)
            case "e" | "edit":
                try:
                    args: JsonValue = parse_strict(rest.encode())
                except PerdureError as error:
                    self.timeline.say(f"not JSON: {error.message}", "red")
                    return None
                return AnswerRequest(answer=Answer.EDIT, args=args)
            case _:
                self.timeline.say("please type y, n, or e with the new arguments", "")
                return None

    async def _resolve(self, service: Service, interrupt_id: str, request: AnswerRequest) -> bool:
        try:
            await resolve(service, LOCAL, interrupt_id, request)
        except PerdureError as error:
            self.timeline.say(f"{error.code}: {error.message}", "red")
            return error.code != "invalid"
        return True


async def _read_line() -> str | None:
    """Return the next line of stdin, None at its end. May be cancelled while nothing comes."""
    descriptor = sys.stdin.fileno()
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        with suppress(OSError):  # what cannot be waited for, such as /dev/null, never blocks
            await anyio.wait_readable(descriptor)
    line = sys.stdin.readline()
    return line or None
