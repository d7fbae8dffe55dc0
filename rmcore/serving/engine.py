"""Rewards from a vLLM process."""

from collections.abc import Sequence
from pathlib import Path

from rmcore.core.errors import RequestError, ServingError
from rmcore.serving.vllm_process import EngineSettings, VllmProcess, check, message

SCORING = ("--served-model-name", "reward", "--runner", "pooling", "--convert", "classify")


class VllmEngine(VllmProcess):
    """A running vLLM that gives rewards. Use `start`, and `stop` whatever happens."""

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        super().__init__(settings, log, SCORING)

    async def scores(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Rewards of rows of token ids, in logits, in their order.

        Raises:
            RequestError: vLLM refuses the rows.
            NotReadyError: it is away.
            EngineFailure: it failed, or a reward is not finite, which JSON cannot say.
            ServingError: it did not answer in time.
        """
        if not token_ids:
            return []
        body = {"model": "reward", "input": [list(ids) for ids in token_ids], "use_activation": False}
        answer = await self._post("/classify", json=body)
        if answer.status_code in (400, 422):
            raise RequestError(f"vLLM refuses these token ids: {message(answer)}")
        check(answer, "scored")
        rows = sorted(answer.json()["data"], key=lambda row: row["index"])
        if len(rows) != len(token_ids) or any(len(row["probs"]) != 1 for row in rows):
            raise ServingError(f"vLLM gave {len(rows)} results for {len(token_ids)} rows, or not one number a row.")
        return [float(row["probs"][0]) for row in rows]
