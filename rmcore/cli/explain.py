"""`rm-opt explain`: why a reward model says what it says."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.common import print_block, setting, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Checkpoint, JsonOut, ModelReading, PairReading, Seed, written_as
from rmcore.cli.options import options
from rmcore.config.explain import ExplainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.printing import printable

if TYPE_CHECKING:
    from rmcore.data.pair import PreferencePair

SHOWN_CHARS = 90
"""Characters of a text in the terminal."""


@options()
@common("data", "row", "prompt", "response", "against", "out", "json_out")
def explain(
    checkpoint: Checkpoint,
    reading: PairReading,
    model: ModelReading,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Held-out pairs: a file, a folder, a hub name.")
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option("--row", help="Explain this pair of --data, by its id or the beginning of it; repeatable."),
    ] = None,
    mistakes: Annotated[int, setting(ExplainConfig, "mistakes")] = 10,
    prompt: Annotated[str | None, typer.Option(help="Explain an answer to this prompt, in place of --data.")] = None,
    response: Annotated[str | None, typer.Option(help="The answer to --prompt.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another answer to --prompt, held to be worse: the pair is explained.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.", callback=written_as(".html"))] = Path("explain.html"),
    json_out: JsonOut = None,
    seed: Seed = 0,
) -> None:
    """Show the parts of an answer and the edits behind a reward.

    Of --data its worst mistakes are explained and grouped into kinds, or the pairs that --row names. A page shows all,
    the terminal most of it. Example: rm-opt explain --checkpoint out/best --data test.parquet
    """
    from rmcore.core.progress import progress_bar
    from rmcore.data.pair import PreferencePair
    from rmcore.explain.record import explain_alone, explain_mistakes, explain_named
    from rmcore.reporting.html.explained import write_explanation

    if (prompt is None) != (response is None) or (against is not None and prompt is None):
        raise ConfigError("--prompt and --response go together: the answer is --response; --against is another one.")
    if (data is None) == (prompt is None) and not (data is not None and against is not None):
        raise ConfigError(
            "name what is to be explained: --data FILE for its worst mistakes, with --row ID for one pair of it, or "
            "--prompt TEXT --response TEXT for an answer of your own."
        )
    if row and (data is None or prompt is not None):
        raise ConfigError("--row names a pair of --data; name the file, and no --prompt.")
    model = model.in_float32("what a word adds to one is often less than their rounding")
    held_out = [] if data is None else reading.read(data)
    rm = model.load(checkpoint)
    with progress_bar("explain") as report:
        if prompt is not None and response is not None and against is None:
            found = explain_alone(rm, prompt, response, report=report)
            what = "an answer"
        elif prompt is not None and response is not None and against is not None:
            pair = PreferencePair(prompt, response, against)
            found = explain_named(rm, [pair], seed=seed, report=report)
            what = "two answers"
        elif row:
            pairs = [pair for one in row for pair in _named(one, held_out, str(data))]
            found = explain_named(rm, pairs, seed=seed, report=report)
            what = f"{len(pairs)} pairs of {data}" if len(pairs) > 1 else f"a pair of {data}"
        else:
            found = explain_mistakes(rm, held_out, most=mistakes, seed=seed, report=report)
            what = f"its worst mistakes of {data}"
    record: dict[str, Any] = {
        **model.named(checkpoint),
        "data": data,
        "title": f"Why {'/'.join(Path(checkpoint).parts[-2:])} says what it says",
        "subtitle": f"{checkpoint} on {what}.",
        **found.to_dict(),
    }
    _print(record)
    write_report_json(json_out, record)
    print(f"page: {write_explanation(record, out)}")


def _named(row: str, pairs: "list[PreferencePair]", data: str) -> "list[PreferencePair]":
    """The pairs with this id, or with the one id that begins so: ids of a file of one's own may be there twice."""
    found = [pair for pair in pairs if pair.pair_id == row] or [pair for pair in pairs if pair.pair_id.startswith(row)]
    if len({pair.pair_id for pair in found}) != 1:
        many = f"{len(found)} pairs of {data} have ids that begin so" if found else f"no pair of {data} has such an id"
        raise ConfigError(
            f"--row {row}: {many}; ids are in the report's list of mistakes and in the table that `rm-opt evaluate "
            "--rewards FILE` writes."
        )
    return found


def _print(record: Mapping[str, Any]) -> None:
    """Show what the page shows, of each answer the parts whose effects the page has in numbers."""
    from rmcore.reporting.html.explained import answers, explained_block

    print_block(explained_block(record), is_whole=True)
    told = answers(record)
    for answer in told["answers"]:
        _print_answer(answer)
    for pair in told["pairs"]:
        print(f"\npair {printable(pair['pair_id'])}  margin {pair['margin']}  {_quoted(pair['prompt'])}")
        for side in pair["sides"]:
            _print_answer(side)
        print(f"  {pair['turn']['text']}")


def _print_answer(answer: Mapping[str, Any]) -> None:
    print(f"  {answer['label']}, reward {answer['reward']}")
    for piece in answer["sentences"]:
        if piece["number"]:
            print(f"    {piece['number']}  {_quoted(piece['text'].strip())}")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…")
