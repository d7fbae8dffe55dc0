"""The data of a search: too few prompts are refused before trials are paid for."""

import pytest

from flows.tune import FEWEST_PROMPTS, require_prompts
from rmcore.core.errors import DataError
from rmcore.data.table import write_pairs


@pytest.mark.parametrize("split", ["validation", "test"])
def test_pairs_of_few_prompts_are_refused_before_the_search_is_paid_for(tmp_path, gold_pairs, split):
    prompts = list(dict.fromkeys(pair.prompt_id for pair in gold_pairs))
    for num in (FEWEST_PROMPTS, FEWEST_PROMPTS - 1):
        own = [pair for pair in gold_pairs if pair.prompt_id in prompts[:num]]
        write_pairs(own, tmp_path / f"{split}.parquet")
        if num == FEWEST_PROMPTS:
            require_prompts(tmp_path, split)
    with pytest.raises(DataError, match=rf"of 9 prompts.*raise data.{split}_fraction"):
        require_prompts(tmp_path, split)
    with pytest.raises(DataError, match="of 0 prompts"):
        require_prompts(tmp_path / "nothing", split)
