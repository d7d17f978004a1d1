"""The forms in which a workflow's file may hold its nodes."""

import json

import pytest

from qwen21.comfy_client.workflow import Workflow
from qwen21.errors import UserError

NODES = {"3": {"class_type": "KSampler", "inputs": {"seed": 1}}}


@pytest.mark.parametrize("beside", [{}, {"client_id": "x", "extra_data": {}}])
def test_the_form_that_servers_take_is_unwrapped(tmp_path, beside):
    file = tmp_path / "wrapped.json"
    file.write_text(json.dumps({"prompt": NODES, **beside}))
    assert Workflow.read(file).nodes == NODES


def test_a_node_may_be_called_prompt(tmp_path):
    file = tmp_path / "named.json"
    file.write_text(json.dumps({"prompt": NODES["3"]}))
    assert Workflow.read(file).nodes == {"prompt": NODES["3"]}


def test_what_is_wrapped_is_checked_too(tmp_path):
    file = tmp_path / "bad.json"
    file.write_text('{"prompt": {"nodes": []}}')
    with pytest.raises(UserError, match="the editor's format"):
        Workflow.read(file)
