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
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError, JudgementsWantedError, NotReadyError, ServingError
from rmcore.core.extras import require_extra
from rmcore.core.manifests import make_key
from rmcore.core.progress import Report, duration, silent
from rmcore.core.web import LOOPBACK, uses_proxies
from rmcore.judging.answers import AnswersFile, Question, Reply, answers_folder
from rmcore.judging.budget import Budget, NotSentError
from rmcore.judging.replies import TOP_LOGPROBS, most_bytes, read_reply, root_of
from rmcore.training.interruption import Interruption, deferred_interruption

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

    from rmcore.judging.sending import LimitedClient

FORM = "openai:MODEL@URL, for example openai:qwen3-8b@http://127.0.0.1:8000/v1"
_FORM = re.compile(r"openai:(?P<model>\S+?)@(?P<url>https?://\S+)")
RETRIES = 5
LONGEST_WAIT = 600.0
"""Seconds that a server may ask to wait: quotas are of a minute, or of a day."""
MOST_REFUSED = 8
"""Refused questions, with none that is answered, after which it is not about their texts."""
MOST_ROUNDS = 5
"""How often a question is requested with all repetitions, while the server answers others: one may be unlucky."""
LIST_RETRIES = 3
LIST_SECONDS = 10.0
ROOT = "root "
"""Before what a server calls a model's root, where answers are kept; a host has no space."""
NO_COMPLETION = "answers with something that is no chat completion"
STOPPING = b"stopping when what was requested is answered, which is kept. Press Ctrl-C again to quit immediately.\n"
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
        match = _FORM.fullmatch(named)
        if match is None or not named.isprintable():
            shown = repr(re.sub(r"//.*", "//…", named))  # what follows may hold a key
            raise ConfigError(f"the judge {shown} names no endpoint; write {FORM}.")
        address = cls(match["model"], match["url"].rstrip("/"))
        if "@" in address.url or "?" in address.url or "#" in address.url:
            raise ConfigError(
                f"the URL of the judge {address.model} has a user name, or something after ? or #. An address is kept "
                "and shown, so that it may hold no credentials: put the key into the environment variable that "
                f"policy.judging.key_variable names, and write {FORM}."
            )
        try:
            parts = urlsplit(address.url)
            has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError as error:
            raise ConfigError(f"the judge's URL {address.url} is none ({error}); write {FORM}.") from error
        if not has_host:
            raise ConfigError(f"the judge's URL {address.url} names no host; write {FORM}.")
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
        self._uses_proxies = uses_proxies(urlsplit(address.url).hostname)
        self.answers = AnswersFile(folder or answers_folder(), address.model)
        self.budget = Budget(settings)
        """Spent by this object; answers that were stored cost nothing."""
        self.models: dict[str, int] = {}
        """Replies by the name that the server gave."""
        self._refused: set[str] = set()
        self._noted: set[str] = set()
        self._is_answering = False
        """Whether any question was answered, now or before: a refusal is of that one question then."""
        self._pending: list[tuple[Question, Reply]] = []
        """Questions that were refused while none is answered."""
        self._num_open = 0
        """Questions under way."""
        self._http: LimitedClient
        self._interruption: Interruption
        self._is_hurried = False
        """Whether not even what is under way is waited for."""
        self.served = ""
        """Which model answers: what the server calls its root, else its host; empty until it is needed."""
        self.answers.refresh()

    def ask(self, questions: Sequence[Question], report: Report = silent) -> list[Reply]:
        """Answer N questions, from the file or by the endpoint.

        Raises:
            ConfigError: the endpoint takes no call of this kind, or refuses the key.
            JudgementsWantedError: the budget is spent; what was answered is kept.
            ServingError: the endpoint does not answer, after five repetitions; what was answered is kept.
        """
        if not self.served:
            self._run(self._identify())
        self.answers.refresh()
        self._is_answering = self._is_answering or self.answers.servers[self.served] > 0
        self._pending = []
        by_key = {self._key(question): question for question in questions}
        missing = [question for key, question in by_key.items() if key not in self.answers.known]
        if missing:
            self._run(self._ask_missing(missing, report))
        replies = [self.answers.known[self._key(question)] for question in questions]
        for reply in replies:
            self.models[reply.model] = self.models.get(reply.model, 0) + 1
        return replies

    @property
    def spent(self) -> dict[str, Any]:
        """Calls, tokens and cost of this object, and the replies by the name that the server gave. JSON-ready."""
        return self.budget.to_dict() | {"models": dict(self.models)}

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in a thread of its own: a notebook has a loop already, in which none can be run.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, when what was under way is answered and kept, as it is paid for.
        """
        self._is_hurried = False
        with deferred_interruption(STOPPING) as self._interruption, ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(asyncio.run, work).result()
            except NotSentError:  # for this reason alone it ends the work
                raise KeyboardInterrupt from None
            except KeyboardInterrupt:
                self._is_hurried = True
                raise
        if self._interruption.requested:
            raise KeyboardInterrupt

    def _claim(self, question: Question) -> int | None:
        """Make sure that no other process asks a question now; None if one does, or has its answer."""
        claim = self.answers.claim(self._key(question))
        self.answers.refresh()  # what its last holder has answered
        if claim is not None and self._key(question) in self.answers.known:
            self.answers.release(claim)
            return None
        return claim

    async def _identify(self) -> None:
        """Learn from the server which model it calls by the name; one that does not say is known by its host.

        A server that is away or busy is the one whose answers are stored, if they are of one, and not of another host.
        """
        import httpx2
        import openai

        host = urlsplit(self.address.url).netloc
        async with self._client(LIST_SECONDS) as client:
            quick = client.with_options(max_retries=LIST_RETRIES)
            try:
                listed = (await quick.get("/models", cast_to=httpx2.Response)).json()
                root = root_of(listed, self.address.model)
            except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError):
                stored = [name for name in self.answers.servers if name == host or name.startswith(ROOT)]
                self.served = stored[0] if len(stored) == 1 else host
            except (openai.APIError, ServingError, ValueError):  # it has no such list
                self.served = host
            else:
                self.served = ROOT + root if root else host
        others = {name: count for name, count in self.answers.servers.items() if name != self.served}
        if others and self.served not in self.answers.servers:
            self._note(
                f"{sum(others.values()):,} stored answers of {self.address.model} are of {', '.join(others)} and not "
                f"of {self.served}, and are not used"
            )

    async def _ask_missing(self, missing: Sequence[Question], report: Report) -> None:
        """Ask with as many workers as may wait at once; the first failure lets the others finish their call."""
        waiting, total, num_answered = deque((question, 1) for question in missing), len(missing), 0
        is_over = False

        async def work(client: "AsyncOpenAI") -> None:
            nonlocal num_answered, is_over
            while True:
                while self._num_open and self.budget.may_exceed(self._num_open):
                    await asyncio.sleep(0.01)  # until a call under way says how large they are
                if is_over or self._interruption.requested or self.budget.is_spent or not waiting:
                    return
                (question, rounds), before = waiting.popleft(), num_answered
                claim = self._claim(question)
                if claim is None:  # another process asks it, or has its answer
                    if self._key(question) not in self.answers.known:
                        waiting.append((question, rounds))
                        await asyncio.sleep(WAIT_SECONDS)
                    continue
                self._num_open += 1
                try:
                    self._take(question, *await self._call(client, question))
                except NotSentError:
                    return
                except NotReadyError:
                    if rounds == MOST_ROUNDS or num_answered == before:
                        is_over = True
                        raise
                    waiting.append((question, rounds + 1))
                    continue
                except BaseException:
                    is_over = True
                    raise
                finally:
                    self._num_open -= 1
                    self.answers.release(claim)
                num_answered += 1
                report(num_answered, total, f"asked {self.address.model}")

        async with self._client() as client:
            tasks = [asyncio.create_task(work(client)) for _ in range(min(self.settings.concurrency, total))]
            left = set(tasks)
            while left:
                _, left = await asyncio.wait(left, timeout=WAIT_SECONDS)
                is_ending = is_over or self._interruption.requested or self.budget.is_spent
                if self._is_hurried or (is_ending and not self._http.num_open):
                    for task in left:  # they wait to repeat a request
                        task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
        if failures:  # CancelledError is no Exception
            raise failures[0]
        if not self._interruption.requested:
            self._require_answers(missing)

    def _require_answers(self, missing: Sequence[Question]) -> None:
        """Refuse where questions are left, as all were refused, or the budget is spent."""
        if self._pending:
            raise ConfigError(self._pending[0][1].refusal)
        num_left = sum(self._key(question) not in self.answers.known for question in missing)
        if num_left:
            cost = f" for {self.budget.cost:.4g}" if self.budget.cost else ""
            raise JudgementsWantedError(
                f"the budget for {self.address.model} is spent: {self.budget.num_calls:,} calls and "
                f"{self.budget.num_tokens:,} tokens{cost}, and {num_left:,} questions of this step are open."
                f"{self._http.last_failure} What was answered is kept: the same command continues there with as much "
                "again; max_calls and max_cost of the judging settings are the budget."
            )

    async def _call(self, client: "AsyncOpenAI", question: Question) -> tuple[Reply, bool]:
        """Ask until there is an answer, and whether it is one: a refusal of the text is a reply, too."""
        import httpx2
        import openai

        from rmcore.judging.sending import CLIENT_WAITS, error_line, failure, refused_parameter, wait_named

        num_waits = 0
        while True:
            sent = self._parameters(question)
            try:
                response = await client.post("/chat/completions", body=sent, cast_to=httpx2.Response)
                reply = read_reply(response.json(), question, self.settings.answer_tokens)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                named = refused_parameter(error, sent)
                if named is None:  # about this text, if others are answered
                    why = f"{self._who} refused the question ({error_line(error)})"
                    return Reply("", self.address.model, {}, 0, 0, refusal=why), False
                if named not in self._refused:
                    self._refused.add(named)
                    self._note(f"{self._who} takes no {named}, which is left out ({error_line(error)})")
            except openai.APIError as error:
                seconds = wait_named(error)
                if seconds <= CLIENT_WAITS:
                    said = failure(error, self.settings.key_variable, self.settings.timeout_seconds, self.address.url)
                    raise type(said)(f"{self._who} {said}") from error
                asks = f"{self._who} asks to wait {duration(seconds)} ({error_line(error)})"
                if seconds > LONGEST_WAIT or num_waits == RETRIES:
                    raise ServingError(
                        f"{asks}. What was answered is kept: run the same command again after that, or with a smaller "
                        "concurrency."
                    ) from error
                num_waits += 1
                self._note(f"{asks}; this command waits")
                await asyncio.sleep(seconds)
            except (ServingError, ValueError, RecursionError) as error:
                raise self._unusable(str(error) if isinstance(error, ServingError) else NO_COMPLETION) from error
            else:
                if reply is None:
                    raise self._unusable(NO_COMPLETION)
                self._is_answering = True
                return reply, True

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

    def _client(self, seconds: float = math.inf) -> "AsyncOpenAI":
        """A client that no request takes longer than `seconds`, or than the settings allow."""
        import openai

        from rmcore.judging.sending import LimitedClient

        key = os.environ.get(self.settings.key_variable, "")
        if key and not self.address.is_local and not self.address.url.startswith("https://"):
            raise ConfigError(
                f"{self.address.url} is another machine, and its connection is not encrypted: the key in "
                f"{self.settings.key_variable} could be read on the way. Use https, or name another key_variable."
            )
        self._http = LimitedClient(
            before=self._before_request,
            seconds=min(seconds, self.settings.timeout_seconds),
            most_bytes=most_bytes(self.settings.answer_tokens, with_logprobs=True),
            key=key,
            trust_env=self._uses_proxies,
        )
        # The client insists on a key; a local server without a login ignores it.
        return openai.AsyncOpenAI(
            api_key=key or "none",
            organization="",  # otherwise those of the environment are sent to the named endpoint
            project="",
            base_url=self.address.url,
            timeout=self.settings.timeout_seconds,
            max_retries=RETRIES,
            http_client=self._http,
        )

    def _before_request(self, request: "httpx2.Request") -> None:
        if self._interruption.requested:  # nothing is repeated for somebody who wants to stop
            raise NotSentError
        if request.method == "POST":  # the list of models costs nothing
            self.budget.send()

    @property
    def _who(self) -> str:
        return f"{self.address.model} at {self.address.url}"

    def _note(self, text: str) -> None:
        """Say something once."""
        if text not in self._noted:
            self._noted.add(text)
            print(f"note: {text}", file=sys.stderr, flush=True)

    def _unusable(self, why: str) -> ServingError:
        advice = "The URL usually ends in /v1; open it in a browser, or ask who runs it."
        return ServingError(f"{self._who} {why}. {advice}")

    def _take(self, question: Question, reply: Reply, is_answer: bool) -> None:
        """Count and keep a reply; a refusal is kept once any question is answered, and the first may not all be one."""
        self.budget.add(reply)
        self._pending.append((question, reply))
        if self._is_answering:
            for asked, answer in self._pending:
                self.answers.keep(self._key(asked), self.served, answer)
            self._pending.clear()
        elif len(self._pending) >= MOST_REFUSED:
            raise ConfigError(reply.refusal)
        if is_answer and (reply.tokens_read == 0 or (reply.text and reply.tokens_written == 0)):
            self._require_usage()

    def _require_usage(self) -> None:
        """Refuse a budget in money, which limits nothing where the server counts no tokens."""
        said = f"{self._who} does not say how many tokens an answer took, or gives numbers that cannot be right"
        if self.settings.max_cost is not None:
            raise ConfigError(
                f"{said}, so that max_cost would limit nothing; use max_calls. What was answered is kept."
            )
        self._note(f"{said}; its calls are counted, and not their tokens")

    def _key(self, question: Question) -> str:
        """Under which an answer is kept."""
        asked = {
            "model": self.address.model,
            "served": self.served,
            "messages": [list(turn) for turn in question.messages],
            "temperature": self.settings.temperature,
            "answer_tokens": self.settings.answer_tokens,
        }
        return make_key(asked)


def _sendable(text: str) -> str:
    """The text without halves of surrogate pairs, which no UTF-8 has."""
    return text.encode("utf-8", "replace").decode("utf-8")


def require_openai() -> None:
    """Refuse where the package that asks an endpoint is not installed.

    Raises:
        ConfigError: it is not.
    """
    require_extra("openai", "judge", "a language model as a judge")
