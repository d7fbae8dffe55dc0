"""A request that would have a worker run other code is refused, in whatever form it comes; others pass unchanged."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from tasks.declared_deployments import FIELDS, JOB_TEMPLATE, MOST_BYTES, Declared, OnlyDeclared, read_declared
from tasks.home import project_root

PULL = [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $RM_OPT_PROJECT }}"}}]
SHELL = {"prefect.deployments.steps.run_shell_script": {"script": "id"}}
DECLARED = Declared(frozenset({"flows/pipeline.py:pipeline"}), PULL)
ALLOWED = {
    "entrypoint": "flows/pipeline.py:pipeline",
    "pull_steps": PULL,
    "path": ".",
    "base_job_template": JOB_TEMPLATE,
}
FOREIGN = {
    "entrypoint": ["flows/pipeline.py:other", ["flows/pipeline.py:pipeline"], {"a": 1}],
    "pull_steps": [[SHELL], [*PULL, SHELL], [{**PULL[0], **SHELL}]],
    "path": ["/tmp"],
    "base_job_template": [{}, {"job_configuration": {"command": "id"}}, JOB_TEMPLATE | {"job_configuration": {"a": 1}}],
    "storage_document_id": ["00000000-0000-0000-0000-000000000000"],
    "infrastructure_document_id": ["00000000-0000-0000-0000-000000000000"],
}


def ask(body, path="/api/deployments/", parts=1):
    """The status of a request, and what the application behind was given of it."""
    sent, given_on = [], []
    size = max(1, -(-len(body) // parts))
    pieces = [body[start : start + size] for start in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": piece, "more_body": place + 1 < len(pieces)}
        for place, piece in enumerate(pieces)
    ]

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        while True:
            message = await receive()
            given_on.append(message["body"])
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(OnlyDeclared(app, DECLARED)(scope, receive, send))
    return sent[0]["status"], b"".join(given_on)


def test_other_code_is_refused_in_whatever_form_it_comes():
    assert set(FOREIGN) == set(FIELDS)
    for name, value in ((name, value) for name, values in FOREIGN.items() for value in values):
        plain = json.dumps({"name": "n", name: value})
        escaped = plain.replace(f'"{name}"', f'"\\u{ord(name[0]):04x}{name[1:]}"')
        twice = f'{{"{name}": null, {plain[1:]}'
        for body in (plain.encode(), plain.encode("utf-16"), escaped.encode(), twice.encode()):
            assert json.loads(body)[name] == value
            for path in ("/api/deployments/", "/api/deployments/x", "/api/work_pools/", "/api/work_pools/rm-opt"):
                assert ask(body, path, parts=2) == (403, b""), (path, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.dictionaries(st.text(max_size=9), JSON, max_size=3),
    ours=st.sets(st.sampled_from(sorted(ALLOWED))),
    empty=st.sets(st.sampled_from(FIELDS)),
    parts=st.integers(1, 4),
)
def test_what_is_declared_or_empty_passes_with_every_byte(body, ours, empty, parts):
    sent = json.dumps(body | dict.fromkeys(empty) | {name: ALLOWED[name] for name in ours}).encode()
    assert ask(sent, parts=parts) == (200, sent)


@given(content=st.binary(max_size=60))
def test_what_is_no_json_is_prefects_to_refuse(content):
    assert ask(content + b"pull_steps") == (200, content + b"pull_steps")


def test_a_flows_own_parameters_and_other_places_may_have_any_names():
    for path, sent in (("/api/deployments/x/create_flow_run", {"parameters": {"path": "/data", "entrypoint": "x"}}),
                       ("/api/artifacts/", {"path": "/data"})):  # fmt: skip
        assert ask(json.dumps(sent).encode(), path) == (200, json.dumps(sent).encode())


def test_what_is_too_large_or_too_deep_is_refused():
    assert ask(b" " * (MOST_BYTES + 1))[0] == 403
    assert ask(b'{"pull_steps":' + b"[" * 100_000)[0] == 403


def test_the_projects_own_declaration_is_read():
    found = read_declared(project_root())
    assert "flows/pool.py:cell" in found.entrypoints
    assert found.pull_steps == PULL
