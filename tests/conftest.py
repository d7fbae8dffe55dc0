"""Shared by all tests: one thread a process where tests run in parallel, a tiny model built once, no network."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import pixels.sitecustomize  # noqa: F401 - before matplotlib

# A test's time depends on who else uses the two cores; what is drawn depends neither on the day nor on the modules that
# earlier tests of the process have loaded: hypothesis would draw their constants, too.
settings.register_profile(
    "project", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")
assert hasattr(providers, "is_local_module_file"), (
    "this version of hypothesis has another name for what chooses the modules whose constants it draws; set that here"
)
providers.is_local_module_file = lambda file: False

SERVICES_TIMEOUT_S = 3600.0
"""Of a test with servers: above `PATIENCE_S`, so that what was waited for is said first."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("RM_OPT_DIGESTS", os.devnull)  # and not the cache of who runs the tests
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# vLLM's engine computes in its own process, as it does on a GPU: a third of a start's time less than with a worker of
# its own, which it has on a CPU. The server that all tests of a folder share is started that way.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Tables are as wide as the place where the tests run says; a narrow one breaks rows that tests read.
os.environ["COLUMNS"] = "160"


def group_of(nodeid: str) -> str:
    """What one process runs as a whole: a folder of tests/services, whose tests share servers, else a file."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder.startswith("tests/services/") else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups that start servers between groups that compute: two that wait leave the cores to one that does not.

    What is for the night is left out by day. The longest, of tests/services, come first, and the end is of short ones,
    so that no process has a long one left when the others are done.
    """
    if "RM_OPT_NIGHT" not in os.environ:
        night = [item for item in items if item.get_closest_marker("night")]
        config.hook.pytest_deselected(items=night)
        items[:] = [item for item in items if item not in night]
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    waiting, computing = [], []
    for group in groups.values():
        has_servers = any(item.get_closest_marker("services") for item in group)
        (waiting if has_servers else computing).append(group)
    waiting.sort(key=lambda group: "/services/" not in group[0].nodeid)
    first, spread = waiting[:2], waiting[2:]
    between = int(0.8 * len(computing) / max(1, len(spread)))
    ordered = list(first)
    for index, group in enumerate(spread):
        ordered += [*computing[index * between : (index + 1) * between], group]
    ordered += computing[len(spread) * between :]
    items[:] = [item for group in ordered for item in group]
    for item in items:
        if item.get_closest_marker("services"):
            item.add_marker(pytest.mark.integration)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(SERVICES_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what imports make is garbage, and looking for it takes a fifth of the time of finding the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported to find the tests stays to the end, so no collection of garbage need look through it again.

    Libraries ask for whole ones: accelerate at the begin of each training, which took longer than small trainings do.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Under `--dist loadfile`, a folder of tests/services is like one file: its tests share servers in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real preference data; skips where it is not there."""
    folder = os.environ.get("RM_OPT_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("real preference data is absent: set RM_OPT_DATA to its folder")
    return Path(folder)


@pytest.fixture(scope="session", autouse=True)
def small_tiny() -> Iterator[None]:
    """Tests of arithmetic need a model, not 1.3 million parameters of it; `true_tiny` is for those that do."""
    from nano_model import nano_config

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rmcore.models.tiny.tiny_config", nano_config)
        yield


@pytest.fixture(scope="module")
def true_tiny() -> Iterator[None]:
    """Inside, `tiny` is what users get."""
    from nano_model import true_config

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rmcore.models.tiny.tiny_config", true_config)
        yield


@pytest.fixture(scope="module")
def true_pictures() -> Iterator[None]:
    """Inside, figures are drawn; elsewhere they are saved as a pixel, see tests/support/pixels."""
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", Figure.true_savefig)
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained `tiny` model as a Hugging Face folder."""
    from rmcore.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture
def rm(tiny_folder: Path):
    """A fresh reward model on the CPU, plain Hugging Face weights of `tiny`."""
    from rmcore.models.reward_model import BradleyTerryRM

    return BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)


@pytest.fixture(scope="session")
def gold_pairs():
    """Some hundred pairs of the gold world."""
    from rmcore.config.data import GoldConfig
    from rmcore.data.gold.world import generate_pairs

    return generate_pairs(GoldConfig(num_prompts=120, pairs_per_prompt=2), seed=0).pairs


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that holds Prefect's and MLflow's databases without any run, made once for all processes of the tests."""
    from used_homes import make_databases

    own = tmp_path_factory.getbasetemp()
    return make_databases(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session")
def chain_store(tmp_path_factory: pytest.TempPathFactory):
    """What `policy_chain` has made, of all files and processes of the tests: read it, and write nothing into it."""
    from rmcore.core.store import Store

    own = tmp_path_factory.getbasetemp()
    return Store((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "chain_store")


@pytest.fixture
def serve():
    """Starts ASGI applications on ports of this machine: gives the address of what `make(address)` makes."""
    import threading

    import uvicorn

    from rmcore.core.ports import claim

    servers = []

    def start(make):
        listener = claim("127.0.0.1", 0)  # as our own servers do
        listener.listen()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(make(address), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        servers.append((server, thread))
        return address

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


@pytest.fixture
def other_user():
    """Another user of this machine, who takes ports where that works."""
    from other_user import OtherUser

    other = OtherUser()
    yield other
    other.end()


@pytest.fixture(scope="session")
def vllm():
    """The program that starts vLLM; skips where there is none."""
    from rmcore.core.errors import ConfigError
    from rmcore.serving.vllm_process import find_vllm

    try:
        return str(find_vllm())
    except ConfigError:
        assert os.environ.get("CI") != "true", "CI makes .venv-vllm"
        pytest.skip("no vLLM here: make vllm")
