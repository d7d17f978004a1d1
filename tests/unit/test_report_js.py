"""web/report.js over a stand-in of the canvas: what nodes tell is shown whatever the frontend still has."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "web" / "report.js"
# A canvas without scripts/widgets.js, whose widgets refuse the deprecated `inputEl`.
APP = """
export const toasts = [], listeners = {}, nodes = {}
export let extension
export const app = {
  rootGraph: { id: 'graph', getNodeById: id => nodes[id] },
  api: { addEventListener: (name, call) => { listeners[name] = call } },
  extensionManager: { toast: { add: toast => toasts.push(toast) } },
  registerExtension: one => { extension = one },
}
"""
PLAY = """
import * as canvas from './scripts/app.js'
const storage = {}
globalThis.sessionStorage = { getItem: key => storage[key] ?? null, setItem: (key, text) => { storage[key] = text } }
globalThis.document = { createElement: () => ({ style: {}, value: '', addEventListener() {} }) }
await import('./extensions/pack/report.js')
const { extension, nodes, toasts, listeners } = canvas

function make(id, name, output) {
  const type = function () {}
  extension.beforeRegisterNodeDef(type, { name, output })
  const node = Object.assign(new type(), { id, widgets: [], graph: canvas.app.rootGraph })
  node.addDOMWidget = (name, type, element, options) => {
    const widget = { name, type, element, options,
      get value() { return options.getValue() }, set value(text) { options.setValue(text) },
      get inputEl() { throw new Error('inputEl is gone') }, set inputEl(_) { throw new Error('inputEl is gone') } }
    node.widgets.push(widget)
    return widget
  }
  nodes[id] = node
  node.onNodeCreated?.()
  return node
}
const text = node => node.widgets[0]?.value
const seen = {}
const plan = make(1, 'Qwen21MemoryPlan', ['STRING', 'IMAGE']), lora = make(2, 'Qwen21LoadLoRA', ['MODEL', 'STRING'])
seen.others = [make(3, 'Qwen21LoadDiT', ['MODEL']), make(4, 'PreviewAny', ['STRING'])].map(node => node.widgets.length)
seen.saved = plan.widgets.map(widget => [widget.serialize, widget.options.serialize])
plan.onExecuted({ text: ['a plan'] })
lora.onExecuted({ images: [] })
seen.executed = [text(plan), text(lora)]
extension.onNodeOutputsUpdated({ 2: { text: ['of another tab'] }, 3: { text: ['x'] }, 99: { text: ['x'] } })
seen.updated = [text(plan), text(lora)]
const reloaded = make(1, 'Qwen21MemoryPlan', ['STRING']), fresh = make(7, 'Qwen21LoadLoRA', ['STRING'])
reloaded.onConfigure({})
fresh.onConfigure({})
seen.reloaded = [text(reloaded), text(fresh)]
extension.setup()
listeners['qwen21.warnings']({ detail: { warnings: ['take heed', 'and again'] } })
seen.toasts = toasts.map(toast => [toast.severity, toast.detail])
console.log(JSON.stringify(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    if not shutil.which("node"):
        pytest.skip("no node: install it (Debian's nodejs) to test web/report.js")
    folder = tmp_path_factory.mktemp("canvas")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, text in (("scripts/app.js", APP), ("extensions/pack/report.js", SCRIPT.read_text()), ("play.js", PLAY)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run = subprocess.run(["node", "play.js"], cwd=folder, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_node_of_ours_with_a_text_shows_it(seen):
    assert seen["executed"] == ["a plan", ""]
    assert seen["others"] == [0, 0]


def test_outputs_may_come_in_bulk(seen):
    """As after a tab switch, where no node is executed."""
    assert seen["updated"] == ["a plan", "of another tab"]


def test_texts_survive_a_reload_without_being_part_of_the_workflow(seen):
    assert seen["reloaded"] == ["a plan", ""]
    assert seen["saved"] == [[False, False]]


def test_warnings_are_toasts(seen):
    assert seen["toasts"] == [["warn", "take heed"], ["warn", "and again"]]
