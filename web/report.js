// Shows what our nodes tell in words: each text output on its node, warnings as toasts too. ComfyUI sends the text but
// draws no widget for it. The text is no part of the workflow, so saved files and pictures do not carry old reports.
import { app } from '../../scripts/app.js'

const WIDGET = 'what_ran'
const EVENT = 'qwen21.warnings' // nodes/notices.py sends it
const KEPT = 'qwen21.texts' // in the browser tab's own storage: survives a reload, not the tab
const MOST = 100 // texts that are kept

const isOurs = nodeData => nodeData.name.startsWith('Qwen21') && nodeData.output?.includes('STRING')
const widgetOf = node => node?.widgets?.find(widget => widget.name === WIDGET)
const keyOf = node => `${node.graph?.id ?? ''}/${node.id}`

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT)) ?? {}
  } catch {
    return {}
  }
}

function keep(node, text) {
  const { [keyOf(node)]: _, ...others } = kept()
  const newest = [...Object.entries(others).slice(1 - MOST), [keyOf(node), text]]
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(newest)))
  } catch {} // the storage is full or forbidden: the text is on the node all the same
}

function show(node, output) {
  const widget = widgetOf(node)
  if (!widget || !output?.text) return
  widget.value = [output.text].flat().join('\n')
  keep(node, widget.value)
}

// A read-only box. A DOM widget of a type of its own: both kinds of nodes put its very element on the node.
function addBox(node, wraps) {
  const height = wraps ? 120 : 260
  const box = document.createElement('textarea')
  box.readOnly = true
  box.placeholder = 'What ran is shown here.'
  box.className = 'comfy-multiline-input'
  box.style.cssText = `width: 100%; height: 100%; min-height: ${height - 10}px; resize: none; box-sizing: border-box;
    font: 11px/1.4 monospace; white-space: ${wraps ? 'pre-wrap' : 'pre'}; overflow: auto`
  box.addEventListener('wheel', event => event.stopPropagation()) // scrolls the text, not the canvas
  const widget = node.addDOMWidget(WIDGET, 'qwen21_text', box, {
    getValue: () => box.value,
    setValue: text => { box.value = text ?? '' },
    getMinHeight: () => height,
    serialize: false
  })
  widget.serialize = false
}

// Nodes within subgraphs are named by the path to them, 5:3; core finds those by itself when a run tells them.
const nodeOf = id => (app.rootGraph ?? app.graph)?.getNodeById(Number(id)) ?? (app.rootGraph ?? app.graph)?.getNodeById(id)

app.registerExtension({
  name: 'Qwen21.Report',
  setup() {
    app.api.addEventListener(EVENT, ({ detail }) => {
      for (const warning of detail.warnings)
        app.extensionManager?.toast?.add({ severity: 'warn', summary: 'Qwen-Image 2.1', detail: warning, life: 15000 })
    })
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!isOurs(nodeData)) return
    const { onNodeCreated, onConfigure, onExecuted } = nodeType.prototype
    // Made with the node: Vue nodes do not draw widgets that come later.
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.apply(this, arguments)
      addBox(this, nodeData.name !== 'Qwen21MemoryPlan') // its tables keep their lines
    }
    nodeType.prototype.onConfigure = function () {
      onConfigure?.apply(this, arguments)
      const widget = widgetOf(this)
      if (widget && !widget.value) widget.value = kept()[keyOf(this)] ?? ''
    }
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments)
      show(this, output)
    }
  },
  // After a tab switch, a reload or from the queue's history; by the id of a node, or the path to it.
  onNodeOutputsUpdated(outputs) {
    for (const [id, output] of Object.entries(outputs ?? {})) show(nodeOf(id), output)
  }
})
