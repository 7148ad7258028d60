"""Which server takes a request: sessions, load in tokens, servers that come and go."""

from __future__ import annotations

from rl_core.rollout.sglang.router import SESSIONS, Router


def place(router: Router, session: str, tokens: int, excluded: tuple[str, ...] = ()) -> str | None:
    name = router.choose(session, tokens, excluded)
    if name is not None:
        router.take(name, session, tokens)
    return name


def pool(*names: str, limit: int = 1000, most: int = 10**9) -> Router:
    router = Router()
    for name in names:
        router.add(name, limit, most)
    return router


def test_new_sessions_go_to_the_server_with_the_fewest_outstanding_tokens() -> None:
    router = pool("a", "b")
    assert [place(router, s, t) for s, t in (("p", 300), ("q", 100), ("r", 100), ("s", 50), ("t", 100))] == \
        ["a", "b", "b", "b", "b"]
    assert (router.outstanding("a"), router.outstanding("b")) == ((300, 1), (350, 4))
    assert place(router, "u", 1) == "a"


def test_a_session_stays_with_its_server() -> None:
    router = pool("a", "b")
    assert [place(router, "p", 100) for _ in range(8)] == ["a"] * 8
    assert place(router, "q", 100) == "b"


def test_a_session_waits_for_its_full_server_unless_another_has_less_than_half_of_its_load() -> None:
    router = pool("a", "b")
    router.take("a", "p", 900)
    router.take("b", "q", 500)
    assert router.choose("p", 200) is None
    assert router.choose("r", 200) == "b"
    router.give_back("b", 200)
    assert router.choose("p", 200) == "b"


def test_back_pressure_is_by_tokens_and_a_request_larger_than_a_server_runs_alone() -> None:
    router = pool("a", limit=1000)
    assert place(router, "p", 5000) == "a"
    assert router.full and place(router, "q", 1) is None
    router.give_back("a", 5000)
    assert place(router, "q", 600) == "a" and not router.full
    assert place(router, "r", 600) is None
    assert place(router, "s", 400) == "a" and router.full


def test_requests_that_a_server_would_only_queue_wait_here() -> None:
    router = pool("a", "b", most=2)
    assert [place(router, "p", 10) for _ in range(3)] == ["a", "a", "b"]
    assert [place(router, str(i), 10) for i in range(2)] == ["b", None] and router.full
    router.give_back("a", 10)
    assert place(router, "z", 10) == "a"


def test_servers_come_and_go_and_their_sessions_go_elsewhere() -> None:
    router = pool("a", "b")
    place(router, "p", 100)
    router.remove("a")
    assert place(router, "p", 100) == "b"
    router.give_back("a", 100)
    router.add("c", 1000, 10)
    assert place(router, "q", 10) == "c"
    assert router.names == ("b", "c")


def test_excluded_servers_take_nothing() -> None:
    router = pool("a", "b")
    place(router, "p", 100)
    assert place(router, "p", 100, ("a",)) == "b"
    assert place(router, "q", 100, ("a", "b")) is None
    assert Router().choose("p", 1) is None


def test_only_the_newest_sessions_are_remembered() -> None:
    router = pool("a", "b", limit=10**9)
    router.take("a", "first", 1)
    for i in range(SESSIONS):
        router.take("a", str(i), 1)
    assert (router.choose("first", 1), router.choose("0", 1)) == ("b", "a")
