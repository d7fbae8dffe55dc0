"""What is made ahead in a thread is what would be made one by one."""

import threading

import pytest

from rmcore.models.scoring import AHEAD, made_ahead


def test_all_come_in_their_order():
    assert list(made_ahead(lambda number: number**2, range(20))) == [number**2 for number in range(20)]
    assert list(made_ahead(str, [])) == []


def test_one_thread_makes_a_few_ahead_and_no_more():
    made, threads = [], set()

    def make(number):
        threads.add(threading.current_thread().name)
        made.append(number)
        return number

    for number in made_ahead(make, range(10)):
        assert set(made) >= set(range(number + 1))
        assert max(made) <= number + AHEAD
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_what_the_thread_raises_is_raised_in_its_place():
    def make(number):
        if number == 3:
            raise ValueError("three")
        return number

    given = made_ahead(make, range(10))
    assert [next(given) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(given)
