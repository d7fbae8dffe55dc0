"""A stage in a process of its own, and its artifact in the store."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import Store
from rmcore.stages.registry import stage_call
from tasks.execution import execute


def test_of_callers_at_the_same_time_one_does_the_work_and_the_others_get_it(tmp_path):
    store = Store(tmp_path)
    config = PipelineConfig(data=DataConfig(gold=GoldConfig(num_prompts=40)))
    asked, began = stage_call("prepare", config, {}), []

    def call(_):
        follow = lambda path: nullcontext()  # noqa: E731
        return execute(store, asked, follow, lambda: began.append(1))

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(call, range(3)))
    assert len({ref for ref, _ in answers}) == 1
    assert sorted(here for _, here in answers) == [False, False, True]
    assert len(began) == 1
    assert store.status("prepare", answers[0][0].key).state == "valid"
