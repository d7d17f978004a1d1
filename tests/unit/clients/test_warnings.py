"""`run` shows what our nodes warn of, told during the run or kept among its outputs: each once, unasked."""

import json

from qwen21.cli.main import main
from tests.support.fake_comfyui import FakeComfy


def test_warnings_are_shown_once_without_being_asked_for(tmp_path, capsys):
    def play(fake):
        for warnings in (["early\nlines", "twice"], "nonsense"):
            fake.send_event("qwen21.warnings", node="3", warnings=warnings)
        fake.finish({"3": {"qwen21_warnings": ["twice", "late"]}})

    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps({"3": {"class_type": "KSampler", "_meta": {"title": "Paint"}}}))
    with FakeComfy(play) as fake:
        assert main(["run", str(workflow), "--server", fake.url, "--out", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert told == [f'qwen21: warning: node 3 "Paint" (KSampler): {text}' for text in ("early lines", "twice", "late")]
