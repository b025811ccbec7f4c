"""Which agents are registered, remembered for a moment so that creating a run reads no list."""

from perdure.engine.ports import Clock
from perdure.protocol.agents import AgentCard, read_card
from perdure.store.reader import Reader

REMEMBERED_S = 2.0


class AgentDirectory:
    """The registered agents. What is not found is looked up again at once."""

    def __init__(self, reader: Reader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._cards: dict[str, list[AgentCard]] = {}
        self._read_at = float("-inf")
        self._reading = False

    async def find(self, agent_id: str, version: str | None) -> AgentCard | None:
        """Return the card of a version, or of the one registered last; None when unknown."""
        fresh = self._clock.monotonic() - self._read_at < REMEMBERED_S
        card = self._look(agent_id, version)
        if card is not None and (fresh or self._reading):
            return card
        self._reading = True
        try:
            await self._read()
        finally:
            self._reading = False
        return self._look(agent_id, version)

    def _look(self, agent_id: str, version: str | None) -> AgentCard | None:
        cards = self._cards.get(agent_id, [])
        found = [card for card in cards if version is None or card.version == version]
        return found[-1] if found else None

    async def _read(self) -> None:
        cards: dict[str, list[AgentCard]] = {}
        for agent in await self._reader.list_agents():
            card = read_card(agent.card)
            if card is not None:
                cards.setdefault(agent.agent_id, []).append(card)
        self._cards = cards
        self._read_at = self._clock.monotonic()
