"""The borrower's end of a loan: an engine over the one server that rollout has lent, at the version that it is lent at.

It gives the server no weights: its lender has done that, and compared its checksum. Every answer must be by that
version in the server's own words. Training's limits on sampling do not hold here: nothing is trained on these answers.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import cast

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import DeadPart
from rl_core.model_setup import check_model
from rl_core.rollout.engine import Loan
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.types import Completion, GenerateRequest, WeightVersion

GONE_S = 5.0
"""A lent server that is away for so long is gone: its lender starts it again elsewhere."""


class Borrower:
    """An Engine for one who has no server: `borrow`, ask, `give_back`. Thread-safe as every engine.

        borrower = Borrower(run.model, config)
        borrower.borrow(loan)
        borrower.submit(request)
    """

    def __init__(self, model_dir: Path, config: Config) -> None:
        """Raises ConfigError for a model that cannot be run."""
        self._model_dir, self._config = model_dir, config
        self.context = min(check_model(model_dir).context, config.served_tokens)
        self._engine: SglangEngine | None = None
        self._closed = False

    def borrow(self, loan: Loan) -> None:
        """Ask this server from now on. Raises EngineStartFailed where it is not there, or not at its version."""
        self.give_back()
        if self._closed:
            raise DeadPart("borrower of a server: closed")
        settings = cast(SglangEngineConfig, self._config.rollout.engine)
        most = min(settings.max_running, self._config.validation.slots)
        of_one = settings.model_copy(update={"urls": (loan.url,), "max_running": most, "start_s": GONE_S})
        self._engine = SglangEngine(self._model_dir, config=of_one, context=self.context, loan=loan)

    def give_back(self) -> None:
        """Ask it no more; what runs is ended. The lender is told by whoever made the loan."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # -- the engine protocol

    @property
    def served(self) -> WeightVersion | None:
        return None if self._engine is None else self._engine.served

    @property
    def running(self) -> int:
        return 0 if self._engine is None else self._engine.running

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        engine = self._engine
        if engine is None:
            future: Future[Completion] = Future()
            future.set_exception(DeadPart(f"request {request.request_id!r}: no server is borrowed"))
            return future
        return engine.submit(request)

    def cancel(self, request_id: str) -> None:
        if (engine := self._engine) is not None:
            engine.cancel(request_id)

    def swap(self, version: WeightVersion, weights_dir: Path) -> str:
        """Its lender gives a lent server its weights: this only says that they are these."""
        engine = self._engine
        if engine is None:
            raise DeadPart(f"version {version.v}: no server is borrowed")
        return engine.swap(version, weights_dir)

    def counters(self) -> dict[str, dict[str, float]]:
        return {} if self._engine is None else self._engine.counters()

    def close(self) -> None:
        self._closed = True
        self.give_back()
