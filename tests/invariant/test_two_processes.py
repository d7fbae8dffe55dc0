"""Two processes that share one model follow the trajectory of one, and either can resume from the other's state.

Two hosts are two launchers of torchrun's.
"""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.distributed.run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import sharded_training
from fresh_forks import fork
from machine import PATIENCE_S, free_ports
from nano_model import nano_config
from rmcore.core.files import file_digest
from rmcore.models.tiny import build_tiny

pytestmark = pytest.mark.slow
NEVER = 10**6
"""No step of these trainings."""


def run(folder, processes, stop_at=0, fails=False, hosts=None, **changes):
    """In processes as torchrun starts them.

    hosts: folders of processes that are alone on their hosts, in place of `folder`.
    """
    folder.mkdir(exist_ok=True)
    [port] = free_ports(1)
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        if hosts:
            folder = hosts[rank]
            place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        variables = {name: str(value) for name, value in (place | {"MASTER_PORT": port}).items()}
        given = (folder, stop_at, changes, variables if processes > 1 else {})
        started.append((fork(folder / f"log{rank}", sharded_training.main, *given), folder / f"log{rank}"))
    ended = [(_status(process), log.read_text()) for process, log in started]
    if fails:
        return ended
    assert [status for status, _ in ended] == [0] * processes, "\n".join(told[-3000:] for _, told in ended)
    return None


def _status(process):
    process.join(PATIENCE_S)
    assert process.exitcode is not None, "it still runs"
    return process.exitcode


def run_on_two_hosts(folder, second_dies_at):
    """Exit status and output of the launcher, torchrun's, of each host."""
    [port] = free_ports(1)
    started = []
    for rank in range(2):
        spec = folder / f"spec{rank}.json"
        spec.write_text(json.dumps([str(folder), -second_dies_at if rank else NEVER, {}]))
        words = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=127.0.0.1",
                 f"--master-port={port}", sharded_training.__file__, str(spec)]  # fmt: skip
        started.append(fork(folder / f"launcher{rank}", torch.distributed.run.main, words))
    return [_status(process) for process in started], (folder / "launcher0").read_text()


def outcome(folder):
    told = json.loads((folder / "rows.json").read_text())
    weights = torch.load(folder / "weights.pt", weights_only=True)
    return told, weights, np.load(folder / "best_rewards.npy")


def losses(told):
    return [values["train/loss"] for values in told["rows"].values() if "train/loss" in values]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(folder, 1)
    return outcome(folder)


def assert_follows(folder, alone):
    told, weights, rewards = outcome(folder)
    expected_told, expected_weights, expected_rewards = alone
    assert len(losses(told)) == 14
    np.testing.assert_allclose(losses(told), losses(expected_told), rtol=1e-5)
    for step, values in expected_told["rows"].items():
        for name in ("train/pairwise_accuracy", "train/mean_margin", "train/grad_norm", "eval/loss", "eval/num_pairs"):
            if name in values:
                assert told["rows"][step][name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), (step, name)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rewards, expected_rewards, atol=1e-4)
    return told


def test_two_hosts_of_which_one_died_follow_the_trajectory_of_one(tmp_path, alone):
    [status, killed], errors = run_on_two_hosts(tmp_path, second_dies_at=8)
    assert (status, killed) == (1, -signal.SIGKILL)
    assert "another process of this training has ended, or its host cannot be reached" in errors
    [state, *_] = sorted(tmp_path.glob("resume/step_*"))
    assert int(state.name[5:]) in (6, 7, 8)
    run(tmp_path, 2, hosts=[tmp_path, tmp_path])
    told = assert_follows(tmp_path, alone)
    assert told["result"]["resumed_from"][0] in (6, 7, 8)
    assert told["result"]["num_processes"] == 2
    assert told["result"]["num_pairs"] == alone[0]["result"]["num_pairs"]
    assert told["result"]["num_real_tokens"] == alone[0]["result"]["num_real_tokens"]
    # What they leave is a plain checkpoint.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "step_14", dtype=torch.float64)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, alone[1][name], rtol=1e-5, atol=1e-5)


def test_hosts_that_share_no_folder_are_refused_before_the_first_step(tmp_path):
    hosts = [tmp_path / "first", tmp_path / "second"]
    hosts[1].mkdir()
    for status, told in run(hosts[0], 2, fails=True, hosts=hosts):
        assert status != 0
        assert f"do not see {tmp_path}" in told
        assert "a disk that all hosts share" in told


def test_a_training_goes_on_with_another_number_of_processes_twice(tmp_path, alone):
    """With checkpointing and another budget, which change the trajectory as little."""
    changes = {"gradient_checkpointing": True, "token_budget": 1200}
    run(tmp_path, 2, stop_at=6, **changes)
    run(tmp_path, 1, stop_at=11, **changes)
    assert not (tmp_path / "rows.json").exists()
    run(tmp_path, 2, **changes)
    told = assert_follows(tmp_path, alone)
    first, second = told["result"]["resumed_from"]
    assert (first, second) == (5, second)
    assert 5 < second <= 10  # one process saves while it trains


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A backbone without a head in several files, in bfloat16 as most are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rmcore.models.tiny.tiny_config", nano_config)
        folder = build_tiny(tmp_path_factory.mktemp("backbone"))
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).model
    (folder / "model.safetensors").unlink()
    plain.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_slices_read_from_files_and_states_in_parts_change_nothing(tmp_path, backbone):
    """The head and the adapters are drawn alike; two processes end in the same bits whether interrupted or not.

    They are interrupted in the step after their last state, whose evaluation had changed the checkpoints.
    """
    kept = {"eval_every": 2, "keep_top_k": 2, "best_metric": "eval/loss"}
    changes = {"model": str(backbone), "lora": {"rank": 2}, "steps": 8, "gradient_checkpointing": True} | kept
    one, two, interrupted = (tmp_path / name for name in ("one", "two", "interrupted"))
    run(one, 1, **changes)
    run(two, 2, **changes)
    (told, weights, rewards), (shared, others, theirs) = outcome(one), outcome(two)
    assert (told["deferred"], shared["deferred"]) == (False, True)
    np.testing.assert_allclose(losses(told), losses(shared), rtol=1e-9)
    np.testing.assert_allclose(rewards, theirs, rtol=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-6, atol=1e-9)
    base = "best/adapter/rm_base.json"
    assert (one / base).read_bytes() == (two / base).read_bytes()

    run(interrupted, 2, stop_at=4, **changes)
    assert (interrupted / "step_4").is_dir()
    states = sorted((interrupted / "resume").glob("step_*"))
    writers = {file.name[: len("shard-00001")] for file in states[-1].glob("*.safetensors")}
    assert writers == {"shard-00001", "shard-00002"}
    assert not [path for path in states[-1].iterdir() if path.suffix == ".safetensors" and path.stat().st_mode & 0o077]
    run(interrupted, 2, **changes)
    told, weights, rewards = outcome(interrupted)
    assert told["result"]["resumed_from"] == [3]
    assert all(told["result"][name] == shared["result"][name] for name in ("best_step", "kept_steps"))
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    np.testing.assert_array_equal(rewards, theirs)
    kept = files(interrupted)
    assert kept == files(two)
    assert "best" in {place.parts[0] for place in kept}


def files(folder):
    """Digest of each file of weights in the checkpoints."""
    places = [place for kept in ("best", "step_*") for place in folder.glob(f"{kept}/**/*.safetensors")]
    return {place.relative_to(folder): file_digest(place) for place in places}


def test_a_weight_that_is_not_finite_is_told_by_all_whoever_read_it(tmp_path, backbone):
    broken = shutil.copytree(backbone, tmp_path / "broken")
    file = max(broken.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    tensors = load_file(file)
    name, tensor = max(tensors.items(), key=lambda item: len(item[1]))
    tensor[-1] = torch.nan  # a row of the second process
    save_file(tensors, file, metadata={"format": "pt"})
    ended = run(tmp_path / "run", 2, fails=True, model=str(broken))
    for status, told in ended:
        assert status != 0
        assert f"holds NaN or infinity in {'' if name.startswith('model.') else 'model.'}{name}" in told


def test_observations_of_all_kinds_follow_one_trajectory(tmp_path, backbone):
    """The likelihood's own numbers are sharded, too, and gathered for its part of the step."""
    kinds = {"kinds": ["pair", "tie", "grades", "more"], "model": str(backbone)}
    told, weights, _ = _after(tmp_path / "one", 1, kinds)
    shared, others, _ = _after(tmp_path / "two", 2, kinds)
    assert shared["deferred"]
    np.testing.assert_allclose(losses(told), losses(shared), rtol=1e-9)
    assert {name for name in weights if name.startswith("likelihood.")} == {
        "likelihood.log_tie", "likelihood.log_sigma", "likelihood.cuts.0", "likelihood.cuts.1"
    }  # fmt: skip
    for name, one in weights.items():
        torch.testing.assert_close(one, others[name], rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def _after(folder, processes, kinds):
    run(folder, processes, steps=8, **kinds)
    return outcome(folder)
