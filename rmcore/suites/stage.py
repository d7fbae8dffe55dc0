"""Stage benchmark: the trained model on public benchmarks and sets of one's own, next to its training pairs.

Writes `benchmark.json` (`rmcore.suites.record.benchmark_record`), `rewards_<suite>.parquet` (one row an answer), a
figure and `summary.json`.
"""

from pathlib import Path

from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, prefixed
from rmcore.core.tracking import Tracker
from rmcore.stages.stage import Measuring, stage
from rmcore.suites.settings import BenchmarkConfig

RECORD_FILE = "benchmark.json"
MODEL = "this model"


@stage("benchmark", outcome=(RECORD_FILE, "rewards_*.parquet"), in_mlflow=True)
class BenchmarkStage(Measuring):
    """Scores on public benchmarks, next to the training pairs."""

    benchmark: BenchmarkConfig

    @classmethod
    def require(cls, settings: BenchmarkConfig) -> None:
        """Read the benchmarks that are named: a model could not be measured on one that is not there.

        Raises:
            ConfigError: none is named, there is none of that name, or no file of it.
            DataError: one cannot be read, or is not whole.
        """
        from rmcore.suites.sets import read_sets

        if not settings.suites:
            raise ConfigError(
                "there is no benchmark in this config; set benchmark.suites, for example to [judgebench]."
            )
        read_sets(settings.suites)


def run(settings: BenchmarkStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Score every answer, and compare prompts with those of the training pairs."""
    from rmcore.data.parquet_rows import RecordFile
    from rmcore.data.table import PAIRS
    from rmcore.reporting.figures.style import save
    from rmcore.stages.measurement import load_trained
    from rmcore.suites.blocks import benchmarks_figure
    from rmcore.suites.measure import score_answers, to_table
    from rmcore.suites.question import OVERALL
    from rmcore.suites.record import benchmark_record, find_overlaps
    from rmcore.suites.sets import read_sets

    sets = read_sets(settings.benchmark.suites)
    rm = load_trained(settings)
    rewards = []
    for one in sets:
        rewards.append(score_answers(rm, one.questions, report=prefixed(report, one.suite.name)))
        to_table(one.questions, rewards[-1]).to_parquet(out / f"rewards_{one.suite.name}.parquet")
    pairs = RecordFile(PAIRS, settings.prepared.folder / "train.parquet")
    overlaps = find_overlaps(pairs, sets, report=report)
    record = benchmark_record(MODEL, sets, rewards, overlaps)
    write_json(out / RECORD_FILE, record)
    scores = {f"eval/{name}": told["scores"][OVERALL] for name, told in record["suites"].items()}
    write_json(out / "summary.json", {"metrics": scores})
    save(benchmarks_figure(record), out / "figures" / "benchmarks.png")
