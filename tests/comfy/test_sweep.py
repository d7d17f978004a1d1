"""Every node of core that takes or gives what ours give or take, among our nodes: it works, or is refused by name.

`sweep.json` says which, by version of ComfyUI; `python -m tests.comfy.sweep` writes it. A node that is not in it is
tried all the same.
"""

import json

from tests.comfy.installation import ROOT
from tests.comfy.sweep import swept, try_node

TABLE = json.loads((ROOT / "tests" / "comfy" / "sweep.json").read_text())


def kind(line):
    return line.partition(":")[0] if ":" in line else line


def test_every_node_of_core_works_or_is_refused_by_name(comfy):
    table = TABLE.get(str(comfy.server.installation), TABLE["0.33.0"])
    found = {name: try_node(comfy.server, name, info) for name, info in swept(comfy.server.object_info()).items()}
    assert len(found) > 250
    assert not {name: line for name, line in found.items() if line.startswith("crashes")}
    # A node that lacked a file when the table was written may find one that another test left on this server.
    known = {name: line for name, line in table.items() if not line.startswith("needs a file")}
    expected = {name: kind(known.get(name, line)) for name, line in found.items()}
    assert {name: kind(line) for name, line in found.items()} == expected
    assert all("\n" not in line for line in found.values())


def test_the_table_has_no_crash_and_names_what_is_refused():
    lines = [line for table in TABLE.values() for line in table.values()]
    assert {kind(line).partition(" ")[0] for line in lines} == {"works", "refused", "needs", "core"}
    for line in lines:
        told = line.partition("refused: ")[2]
        assert not told or any(name in told for name in ("Qwen", "MODEL", "node", "latent", "encoder", "VAE")), line
