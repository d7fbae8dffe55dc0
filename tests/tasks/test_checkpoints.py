"""A checkpoint folder is known by the training that it is the best one of."""

from rmcore.core.manifests import make_key
from rmcore.core.store import Store
from tasks.checkpoints import trained_key


def test_only_the_best_checkpoint_of_a_training_of_this_store_is_known(tmp_path):
    store = Store(tmp_path / "store")
    inputs = {"stage": "train"}
    key = make_key(inputs)
    folder = tmp_path / "store" / "train" / f"tiny-seed0-{key[:12]}"
    with store.publish("train", "tiny-seed0", inputs, outcome=("best/*",)) as out:
        for name in ("best", "step_10"):
            (out / name).mkdir()
            (out / name / "config.json").write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(folder / "best", target_is_directory=True)
    assert trained_key(str(folder / "best"), store) == key
    assert trained_key(str(link), store) == key
    elsewhere = tmp_path / "elsewhere" / "best"
    elsewhere.mkdir(parents=True)
    for other in (folder / "step_10", elsewhere, tmp_path / "nowhere"):
        assert trained_key(str(other), store) is None
    (folder / "MANIFEST.json").unlink()
    assert trained_key(str(folder / "best"), store) is None
