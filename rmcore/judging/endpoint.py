"""A language model behind an OpenAI-compatible endpoint, which is asked each question once (`rmcore.judging.answers`).

    policy.judge = openai:MODEL@URL        for example openai:qwen3-8b@http://127.0.0.1:8000/v1

The key is read from the environment when it is needed, is sent to the named URL alone, over plain HTTP only to this
machine, and is stored nowhere.
"""

import asyncio
import math
import os
import re
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rmcore.config.judging import JudgingConfig
from rmcore.core.digests import make_key
from rmcore.core.errors import ConfigError, JudgementsWantedError, ServingError
from rmcore.core.progress import Report, silent
from rmcore.core.proxies import LOOPBACK
from rmcore.judging.answers import AnswersFile, Question, Reply, answers_folder

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI
    from openai.types.chat import ChatCompletion

FORM = "openai:MODEL@URL, for example openai:qwen3-8b@http://127.0.0.1:8000/v1"
_FORM = re.compile(r"openai:(?P<model>[^\s@][^\s]*?)@(?P<url>https?://\S+)")
RETRIES = 5
OPTIONAL = ("top_logprobs", "logprobs", "temperature", "max_tokens")
"""Parameters that some endpoints refuse by name; such a one is left out from then on."""
TOP_LOGPROBS = 20
"""Alternatives of a token that OpenAI's interface gives at most."""
COMPLAINT = (
    r"(?:un(?:supported|recogni[sz]ed|expected|known)|not (?:support|available|allowed|permitted|enabled)|instead of|"
    r"invalid|deprecated|must be|should be)"
)
"""How an endpoint that does not name the parameter in a field of its own says that it takes none."""
MOST_REFUSED = 8
"""Refused questions, with none that is answered, after which it is not about their texts."""
LIST_RETRIES = 3
WAIT_SECONDS = 0.05
"""Between two looks at what another process asks."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model answers, and by which name.

    model: as the endpoint calls it.
    url: base of the interface, which usually ends in /v1.
    """

    model: str
    url: str

    @classmethod
    def parse(cls, named: str) -> "Address":
        """Read `openai:MODEL@URL`.

        Raises:
            ConfigError: it is of another form.
        """
        found = _FORM.fullmatch(named)
        if found is None:
            raise ConfigError(f"the judge {named!r} names no endpoint; write {FORM}.")
        address = cls(found["model"], found["url"].rstrip("/"))
        try:
            parts = urlsplit(address.url)
            has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError as error:
            raise ConfigError(f"the judge's URL {address.url} is none ({error}); write {FORM}.") from error
        if not has_host:
            raise ConfigError(f"the judge's URL {address.url} names no host; write {FORM}.")
        if parts.username is not None:
            raise ConfigError("the judge's URL holds a user name; put the key into the environment instead.")
        return address

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return urlsplit(self.url).hostname in LOOPBACK


class Endpoint:
    """Asks, remembers, and counts what was spent.

    Args:
        address: of the model.
        settings: how it is asked, and the budget.
        folder: where answers are kept; None: `answers_folder()`.
    """

    def __init__(self, address: Address, settings: JudgingConfig, folder: Path | None = None) -> None:
        require_openai()
        self.address, self.settings = address, settings
        self.answers = AnswersFile(folder or answers_folder(), address.model)
        self.num_calls = self.num_tokens = 0
        self.cost = 0.0
        """Spent by this object; answers that were stored cost nothing."""
        self.models: dict[str, int] = {}
        """Replies by the name that the server gave."""
        self._refused: set[str] = set()
        self._is_interrupted = False
        self._is_answering = False
        """Whether any question was answered, now or before: a refusal is of that one question then."""
        self._pending: list[tuple[Question, Reply]] = []
        """Questions that were refused while none is answered."""
        self._num_open, self._largest = 0, 0.0
        """Calls under way; cost of the dearest one so far."""
        self.served = ""
        """Which model answers: what the server calls its root, else its host; empty until it is needed."""
        self._refresh()

    def ask(self, questions: Sequence[Question], report: Report = silent) -> list[Reply]:
        """Answer N questions, from the file or by the endpoint.

        Raises:
            ConfigError: the endpoint takes no call of this kind, or refuses the key.
            JudgementsWantedError: the budget is spent; what was answered is kept.
            ServingError: the endpoint does not answer, after five repetitions; what was answered is kept.
        """
        self._is_interrupted = False
        if not self.served:
            self._run(self._identify())
        self._refresh()
        self._is_answering = self._is_answering or self.answers.servers[self.served] > 0
        self._pending = []
        by_key = {self._key(question): question for question in questions}
        missing = [question for key, question in by_key.items() if key not in self.answers.known]
        if missing:
            self._run(self._ask_missing(missing, report))
        found = [self.answers.known[self._key(question)] for question in questions]
        self._count_models(found)
        return found

    @property
    def spent(self) -> dict[str, Any]:
        """Calls, tokens and cost of this object, and the replies by the name that the server gave. JSON-ready."""
        return {
            **{"num_calls": self.num_calls, "num_tokens": self.num_tokens, "cost": self.cost},
            "models": dict(self.models),
        }

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        with ThreadPoolExecutor(1) as pool:  # a notebook has a loop of its own, in which none can be run
            try:
                pool.submit(asyncio.run, work).result()
            except KeyboardInterrupt:
                self._is_interrupted = True  # what is being answered is paid for, and is kept
                raise

    def _refresh(self) -> None:
        """Take up what any process has stored since, and leave out a temperature that the endpoint has refused."""
        self.answers.refresh()
        if self.address.url in self.answers.without_temperature and "temperature" not in self._refused:
            self._refused.add("temperature")  # the answers are found under what was sent
            print(
                f"note: {self.address.model} at {self.address.url} has refused the parameter temperature before, which "
                f"is left out; remove {self.answers.file} to ask again with it",
                file=sys.stderr,
            )

    def _claim(self, question: Question) -> int | None:
        """Make sure that no other process asks a question now; None if one does, or has its answer."""
        claim = self.answers.claim(self._key(question))
        self._refresh()  # what its last holder has answered
        if claim is not None and self._key(question) in self.answers.known:
            self.answers.release(claim)
            return None
        return claim

    def _count_models(self, replies: Sequence[Reply]) -> None:
        known = set(self.models)
        for reply in replies:
            self.models[reply.model] = self.models.get(reply.model, 0) + 1
        names = [name or "no name" for name in self.models]
        if len(names) > 1 and set(self.models) != known:
            print(
                f"note: {self.address.model} has answered under {len(names)} names ({', '.join(names)}), which may be "
                "different models; name a dated version",
                file=sys.stderr,
            )

    async def _identify(self) -> None:
        """Learn from the server which model it calls by the name; one that does not say is known by its host.

        A server that is away is the one that answered at its address before.
        """
        import openai

        host = urlsplit(self.address.url).netloc
        async with self._client() as client:
            try:
                quick = client.with_options(max_retries=LIST_RETRIES, timeout=min(10.0, self.settings.timeout_seconds))
                listed = getattr(await quick.models.list(), "data", None) or ()
            except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError):
                self.served = self.answers.last_at.get(self.address.url, host)
            except (openai.APIError, ValueError):  # it has no such list
                self.served = host
            else:
                own = next((one for one in listed if getattr(one, "id", None) == self.address.model), None)
                root = getattr(own, "root", None)
                is_told = isinstance(root, str) and root not in ("", self.address.model)
                self.served = f"root {root}" if is_told else host
        others = {name: count for name, count in self.answers.servers.items() if name != self.served}
        if others and self.served not in self.answers.servers:
            print(
                f"note: {sum(others.values()):,} stored answers of {self.address.model} are of {', '.join(others)} and "
                f"not of {self.served}, and are not used",
                file=sys.stderr,
            )

    async def _ask_missing(self, missing: Sequence[Question], report: Report) -> None:
        """Ask with as many workers as may wait at once; the first failure lets the others finish their call."""
        waiting, total, before = deque(missing), len(missing), self.num_calls
        failures: list[Exception] = []

        async def work(client: "AsyncOpenAI") -> None:
            while True:
                while self._num_open and self._may_exceed():
                    await asyncio.sleep(0.01)  # until a call under way says how large they are
                if failures or self._is_interrupted or self._is_spent() or not waiting:  # since it waited, too
                    return
                question = waiting.popleft()
                claim = self._claim(question)
                if claim is None:  # another process asks it, or has its answer
                    if self._key(question) not in self.answers.known:
                        waiting.append(question)
                        await asyncio.sleep(WAIT_SECONDS)
                    continue
                self.num_calls, self._num_open = self.num_calls + 1, self._num_open + 1
                try:
                    reply = await self._call(client, question)
                    self._take(question, reply)
                except (ConfigError, ServingError, OSError) as error:
                    failures.append(error)
                    return
                finally:
                    self._num_open -= 1
                    self.answers.release(claim)
                report(self.num_calls - before, total, f"asked {self.address.model}")

        async with self._client() as client:
            await asyncio.gather(*(work(client) for _ in range(min(self.settings.concurrency, total))))
        if failures:
            raise failures[0]
        if self._pending:
            raise ConfigError(self._pending[0][1].refusal)
        left = sum(self._key(question) not in self.answers.known for question in missing)
        if left:
            raise JudgementsWantedError(
                f"the budget for {self.address.model} is spent: {self.num_calls:,} calls and {self.num_tokens:,} "
                f"tokens{f' for {self.cost:.4g}' if self.cost else ''}, and {left:,} questions of this step are open. "
                "What was answered is kept: the same command continues there with as much again; max_calls and "
                "max_cost of the judging settings are the budget."
            )

    async def _call(self, client: "AsyncOpenAI", question: Question) -> Reply:
        import openai

        while True:
            sent = self._parameters(question)
            try:
                found = _reply(await client.chat.completions.create(**sent), question.choices)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                named = next((one for one in OPTIONAL if one in sent and _is_about(error, one)), None)
                if named is None:  # about this text, if others are answered
                    return Reply("", self.address.model, {}, 0, 0, refusal=self._failed("refused the question", error))
                self._leave_out(named, error)
            except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
                advice = f"; put a valid key into the environment variable {self.settings.key_variable}"
                raise ConfigError(self._failed("refused the key", error) + advice) from error
            except openai.NotFoundError as error:
                raise ConfigError(self._failed("knows no such model or address", error)) from error
            except openai.APITimeoutError as error:
                slow = f"did not answer within timeout_seconds={self.settings.timeout_seconds:g}"
                raise ServingError(self._failed(slow, error)) from error
            except (openai.APIError, ValueError) as error:
                raise ServingError(self._failed("failed", error)) from error
            else:
                if found is None:
                    raise ServingError(
                        f"{self.address.model} at {self.address.url} answers with something that is no chat "
                        "completion. The URL usually ends in /v1; open it in a browser, or ask who runs it."
                    )
                self._is_answering = True
                return found

    def _leave_out(self, parameter: str, error: Exception) -> None:
        """Send a refused parameter no more; the first time that is said."""
        if parameter not in self._refused:
            self._refused.add(parameter)
            print(f"note: {self._failed(f'takes no {parameter}, which is left out', error)}", file=sys.stderr)

    def _parameters(self, question: Question) -> dict[str, Any]:
        sampling = {
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.answer_tokens,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }
        if "max_tokens" in self._refused:  # OpenAI's reasoning models take it by the other name alone
            sampling["max_completion_tokens"] = self.settings.answer_tokens
        if self._refused & {"logprobs", "top_logprobs"}:  # they make no sense without one another
            del sampling["logprobs"], sampling["top_logprobs"]
        return {
            "model": self.address.model,
            "messages": [{"role": role, "content": _sendable(content)} for role, content in question.messages],
            **{name: value for name, value in sampling.items() if name not in self._refused},
        }

    def _client(self) -> "AsyncOpenAI":
        import openai

        key = os.environ.get(self.settings.key_variable, "")
        if key and not self.address.is_local and not self.address.url.startswith("https://"):
            raise ConfigError(
                f"{self.address.url} is another machine, and its connection is not encrypted: the key in "
                f"{self.settings.key_variable} could be read on the way. Use https, or name another key_variable."
            )
        # The client insists on a key; a local server without a login ignores it. A proxy reaches no loopback.
        own = openai.DefaultAsyncHttpxClient(trust_env=not self.address.is_local)
        return openai.AsyncOpenAI(
            api_key=key or "none",
            organization="",  # otherwise those of the environment are sent to the named endpoint
            project="",
            base_url=self.address.url,
            timeout=self.settings.timeout_seconds,
            max_retries=RETRIES,
            http_client=own,
        )

    def _failed(self, what: str, error: Exception) -> str:
        key = os.environ.get(self.settings.key_variable, "")
        said = f"{type(error).__name__}: {_told(error)}"
        shown = (said.replace(key, "…") if key else said)[:600]
        return f"{self.address.model} at {self.address.url} {what} ({shown})"

    def _take(self, question: Question, reply: Reply) -> None:
        """Count and keep a reply; a refusal is kept once any question is answered.

        Raises:
            ConfigError: the first questions are all refused, or a budget limits nothing.
        """
        self._spend(reply)
        self._pending.append((question, reply))
        if self._is_answering:
            for own, one in self._pending:
                self.answers.keep(self._key(own), self.served, self.address.url, self._temperature, one)
            self._pending.clear()
            self._require_usage(reply)
        elif len(self._pending) >= MOST_REFUSED:
            raise ConfigError(reply.refusal)

    def _spend(self, reply: Reply) -> None:
        tokens = reply.tokens_read + reply.tokens_written
        cost = self.settings.cost(reply.tokens_read, reply.tokens_written)
        self.num_tokens, self.cost = self.num_tokens + tokens, self.cost + cost
        self._largest = max(self._largest, cost)

    def _require_usage(self, reply: Reply) -> None:
        if self.settings.max_cost is not None and not (reply.refusal or reply.tokens_read or reply.tokens_written):
            raise ConfigError(
                f"{self.address.model} at {self.address.url} does not say how many tokens an answer took, so that "
                "max_cost would limit nothing; use max_calls. What was answered is kept."
            )

    def _is_spent(self) -> bool:
        limits = ((self.num_calls, self.settings.max_calls), (self.cost, self.settings.max_cost))
        return any(limit is not None and used >= limit for used, limit in limits)

    def _may_exceed(self) -> bool:
        """Whether the calls under way may spend what is left, each as much as the largest so far."""
        limit, largest = self.settings.max_cost, self._largest
        return limit is not None and (largest == 0 or self.cost + (self._num_open + 1) * largest > limit)

    def _key(self, question: Question) -> str:
        """Under which an answer is kept: by the parameters as sent, and it may be from before one was refused."""
        asked = {
            "model": self.address.model,
            "served": self.served,
            "messages": [list(turn) for turn in question.messages],
            "temperature": self.settings.temperature,
            "answer_tokens": self.settings.answer_tokens,
            "ask": question.ask,
        }
        key = make_key(asked)
        return key if key in self.answers.known else make_key(asked | {"temperature": self._temperature})

    @property
    def _temperature(self) -> float | None:
        return None if "temperature" in self._refused else self.settings.temperature


def _sendable(text: str) -> str:
    """The text without halves of surrogate pairs, which no UTF-8 has."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _reply(completion: "ChatCompletion", choices: Sequence[str]) -> Reply | None:
    """Take what is used of a completion; None where it is none, as an error page sent with status 200 is."""
    if not getattr(completion, "choices", None):
        return None
    usage = getattr(completion, "usage", None)
    counts = [getattr(usage, name, 0) for name in ("prompt_tokens", "completion_tokens")]
    read, written = (count if isinstance(count, int) else 0 for count in counts)
    model = getattr(completion, "model", None)
    first = completion.choices[0]
    message = getattr(first, "message", None)
    text, refusal = (getattr(message, name, None) for name in ("content", "refusal"))
    return Reply(
        text=text if isinstance(text, str) else "",
        model=model if isinstance(model, str) else "",
        logprobs=_logprobs_at_answer(getattr(first, "logprobs", None), choices),
        tokens_read=read,
        tokens_written=written,
        refusal=refusal if isinstance(refusal, str) else "",
    )


def _logprobs_at_answer(logprobs: Any, choices: Sequence[str]) -> dict[str, float]:
    """Log-probabilities of the choices at the last token that is one; variants with a space are added up."""
    at = next((one for one in reversed(_listed(logprobs, "content")) if _word(one) in choices), None)
    found: dict[str, float] = {}
    for alternative in _listed(at, "top_logprobs"):
        choice, logprob = _word(alternative), getattr(alternative, "logprob", None)
        if choice in choices and isinstance(logprob, int | float) and math.isfinite(logprob):
            found[choice] = found.get(choice, 0.0) + math.exp(min(0.0, logprob))
    return {choice: math.log(share) for choice, share in found.items() if share > 0}


def _listed(of: Any, name: str) -> list[Any]:
    """A list of what a server sent; empty where it sent anything else, which the client does not check."""
    found = getattr(of, name, None)
    return found if isinstance(found, list) else []


def _word(token: Any) -> str:
    text = getattr(token, "token", None)
    return text.strip() if isinstance(text, str) else ""


def _told(error: Exception) -> str:
    """An error with all that the server said; the client leaves out a body that has no message in its usual place."""
    body = getattr(error, "body", None)
    has_message = body is None or (isinstance(body, Mapping) and isinstance(body.get("message"), str))
    return str(error) if has_message else f"{error} - {body}"


def _is_about(error: "APIStatusError", parameter: str) -> bool:
    """Whether a refusal is about a parameter, and not about a text that has its name in it."""
    if error.param:
        named = error.param == parameter
    else:
        apart = r"\W+(?:\w+\W+){0,5}?"  # up to five words
        said = rf"{COMPLAINT}{apart}{parameter}\b|\b{parameter}{apart}{COMPLAINT}"
        named = re.search(said, _told(error), re.IGNORECASE) is not None
    is_too_long = parameter == "max_tokens" and "context" in _told(error)  # the text and the answer's room together
    return named and not is_too_long


def require_openai() -> None:
    """Refuse where the package that asks an endpoint is not installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("openai") is None:
        raise ConfigError(
            "a language model is asked by the package openai, which is not installed: "
            "pip install 'rm-optimizer[judge]'."
        )
