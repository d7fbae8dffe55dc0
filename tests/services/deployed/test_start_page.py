"""The start page of `rm-opt up` in a browser: links that lead somewhere, and a switch that switches."""

import httpx
import pytest

pytestmark = pytest.mark.services
ROW = "[...document.querySelectorAll('tr')].find(row => row.innerText.includes('nightly-ablation'))"


def schedule(services):
    deployment = services.deployment("experiment", "nightly-ablation")
    [found] = deployment["schedules"]
    return f"{services.start}/schedules/{deployment['id']}/{found['id']}", found["active"]


def test_it_asks_for_the_password_and_answers_its_own_pages_only(services):
    assert services.start in services.printed
    assert httpx.get(services.start).status_code == 401
    place, _ = schedule(services)
    foreign = services.http.post(place, content="active=on", headers={"Origin": "http://elsewhere.example"})
    assert foreign.status_code == 403
    assert httpx.post(place, content="active=on").status_code == 401
    assert schedule(services) == (place, False)


def test_in_a_browser_a_schedule_is_turned_on_and_off(services, browse):
    address = services.start.replace("//", f"//any:{services.password}@")
    page = browse(address, "1280,1600", ["nightly-ablation", "Reports"])
    assert f'href="{services.ui}/deployments"' in page
    assert f'href="{services.mlflow}"' in page
    assert "register the claims" not in page  # of a schedule the first sentence
    for is_on in (True, False):
        browse.run(f"{ROW}.querySelector('button').click()")
        offered = f"turn {'off' if is_on else 'on'}"
        assert offered in browse.wait(f"{ROW}?.innerText ?? ''", lambda text, offered=offered: offered in text)
        assert schedule(services)[1] is is_on
