"""The file in which a model's answers are kept, so that no process asks the endpoint a question twice.

Every answer is appended as it comes, under a digest of the model's name, what its server says of it, the messages and
the sampling settings: a run that was killed, or whose budget is spent, asks nothing twice, stages share what
was answered, and of processes that ask at the same time one asks each question.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from rmcore.core.files import append_json_lines, exclusive
from rmcore.core.manifests import make_key

THOUGHTS = re.compile(
    r"^.*(?:</think(?:ing)?>|\[/THINK\]|<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>)"
    r"|^analysis.*assistantfinal",
    re.DOTALL,
)
"""Thoughts before an answer: between tags (`<think>`, Magistral's `[THINK]`), or the channels of gpt-oss
(https://github.com/openai/harmony), with their control tokens or with these left out."""
THINKING = re.compile(r"<think|\[THINK\]|<\|channel\|>|analysis")
"""How thoughts begin."""
_END = re.compile(r"(?:<\|(?:return|end)\|>)+$")
_FENCE = re.compile(r"```[\w-]*[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """One question, to be answered by one of a few choices.

    messages: (role, content) of the turns.
    choices: words that an answer may be, each of one token as a rule.
    """

    messages: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a question.

    text: the answer as it is.
    model: name that the server gave.
    logprobs: of the choices at the place of the answer, by choice; empty where the server gives none.
    tokens_read: of the question, by the server's count.
    tokens_written: of the answer, thoughts included.
    refusal: the endpoint's reason for giving no answer, or empty.
    lost: why the answer says nothing of the question and asking again would not help, with what does; or empty.
    """

    text: str
    model: str
    logprobs: Mapping[str, float]
    tokens_read: int
    tokens_written: int
    refusal: str = ""
    lost: str = ""

    @property
    def answer(self) -> str:
        """The text behind the thoughts, without a Markdown fence around it."""
        said = _END.sub("", THOUGHTS.sub("", self.text.strip()).strip()).strip()
        fenced = _FENCE.fullmatch(said)
        return fenced[1].strip() if fenced else said

    @property
    def is_thinking(self) -> bool:
        """Whether its thoughts did not end."""
        return THINKING.match(self.answer) is not None


class AnswersFile:
    """The answers of one model that this and other processes have stored.

    Args:
        folder: made where it is not there.
        model: as its endpoint calls it.
    """

    def __init__(self, folder: Path, model: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[:60]
        self.file = folder / f"{slug}-{make_key({'model': model})[:12]}.jsonl"
        self.known: dict[str, Reply] = {}
        """Answers by the key of their question."""
        self.servers: Counter[str] = Counter()
        """Stored answers by which model gave them, as its server says."""
        self._offset = 0
        self._claims: BinaryIO | None = None

    def keep(self, key: str, served: str, reply: Reply) -> None:
        """Store an answer, and of which model it is."""
        self.known[key] = reply
        with exclusive(self.file.with_suffix(".lock")):
            self.file.touch(mode=0o600)
            self._end_line()
            append_json_lines(self.file, [{"key": key, "served": served, **asdict(reply)}])

    def refresh(self) -> None:
        """Take up what was appended since the last time, by any process; a line that a crash has cut is left out."""
        if not self.file.is_file() or self.file.stat().st_size <= self._offset:
            return
        with self.file.open("rb") as file:
            file.seek(self._offset)
            *lines, _ = file.read().split(b"\n")  # the last piece is not written to its end
        num_damaged = 0
        for line in lines:
            self._offset += len(line) + 1
            try:
                row = json.loads(line)
                key, served = row.pop("key"), row.pop("served")
                reply = Reply(**row)
                self.servers[served] += 1
                self.known[key] = reply
            except ValueError:  # cut by a crash
                continue
            except (AttributeError, TypeError, KeyError):
                num_damaged += 1
        if num_damaged:
            print(
                f"note: {num_damaged:,} lines of {self.file} are no answers; they are not used, and their questions "
                "are asked again",
                file=sys.stderr,
            )

    def claim(self, key: str) -> int | None:
        """Make sure that no other process asks a question now; None if one does.

        A claim is the lock of one byte of a file, which the kernel frees when its holder dies.
        """
        if self._claims is None:
            self._claims = self.file.with_suffix(".claims").open("ab")
        byte = int(hashlib.sha256(key.encode()).hexdigest()[:15], 16)  # below 2^60
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return None
        return byte

    def release(self, claim: int) -> None:
        """Let other processes ask what was claimed."""
        if self._claims is not None:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, claim)

    def _end_line(self) -> None:
        """End a line that a crash has cut, so that it spoils no other."""
        with self.file.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")


def answers_folder() -> Path:
    """Where answers are kept: `judge/` of the home, without one of the user's cache."""
    home = os.environ.get("RM_OPT_HOME")
    if home:
        return Path(home).expanduser() / "judge"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rm-opt" / "judge"
