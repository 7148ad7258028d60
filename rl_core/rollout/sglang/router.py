"""Which server takes a request: pure bookkeeping, no clock, no network.

A session (the answers of one prompt) stays with the server that has its prompt in its prefix cache; a new one goes to
the server with the fewest outstanding tokens. Tokens outstanding are those of prompts and of answers as long as they
may become; a server that would be asked for more than its limit takes nothing more, except when it has nothing at all.
Nor does it take more requests than it runs at once: they wait here, where any server may take them, and where weights
that change meanwhile change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

SESSIONS = 1 << 14
"""Newest sessions whose server is remembered."""


@dataclass(slots=True)
class Place:
    """One server that takes requests."""

    limit: int
    """Most outstanding tokens."""
    most: int
    """Most requests."""
    tokens: int = 0
    requests: int = 0

    def has_room(self, tokens: int) -> bool:
        return not self.requests or (self.tokens + tokens <= self.limit and self.requests < self.most)


class Router:
    """`choose` names a server, `take` and `give_back` book; servers come (`add`) and go (`remove`) at any time.

        router = Router()
        router.add("a", limit=8192, most=128)
        router.choose("prompt", 300)        # "a"; None: nobody has room now
        router.take("a", "prompt", 300)
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    @property
    def full(self) -> bool:
        """Whether no server has room for a single token."""
        return not any(place.has_room(1) for place in self._places.values())

    def add(self, name: str, limit: int, most: int) -> None:
        """A server that takes requests from now on, under a name that no server has had before."""
        self._places[name] = Place(limit, most)

    def remove(self, name: str) -> None:
        """It takes nothing more; its sessions go elsewhere. What was booked on it is forgotten."""
        self._places.pop(name, None)
        for session in [session for session, at in self._sessions.items() if at == name]:
            del self._sessions[session]

    def choose(self, session: str, tokens: int, excluded: Collection[str] = ()) -> str | None:
        """The server for a request of so many tokens; None when no server that is not excluded has room.

        A session waits for its server where that one is only full, unless another has less than half of its load.
        """
        open_to = {name: place for name, place in self._places.items() if name not in excluded}
        roomy = [name for name, place in open_to.items() if place.has_room(tokens)]
        at = self._sessions.get(session)
        if at in open_to:
            if at in roomy:
                return at
            roomy = [name for name in roomy if open_to[name].tokens < open_to[at].tokens / 2]
        return min(roomy, key=lambda name: (open_to[name].tokens, open_to[name].requests), default=None)

    def take(self, name: str, session: str, tokens: int) -> None:
        """Book a request on a server, and its session with it."""
        place = self._places[name]
        place.tokens += tokens
        place.requests += 1
        self._sessions[session] = name
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def give_back(self, name: str, tokens: int) -> None:
        """A request that was booked has ended there; a server that has gone is no error."""
        place = self._places.get(name)
        if place is not None:
            place.tokens -= tokens
            place.requests -= 1

    def outstanding(self, name: str) -> tuple[int, int]:
        """`(tokens, requests)` booked on a server."""
        place = self._places.get(name)
        return (place.tokens, place.requests) if place else (0, 0)
