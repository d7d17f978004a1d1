// Shows the sampler's report on its node: ComfyUI sends the text, but draws no widget for it by itself.
import { app } from '../../scripts/app.js'
import { ComfyWidgets } from '../../scripts/widgets.js'

const WIDGET = 'what_ran'

app.registerExtension({
  name: 'Qwen21.Report',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== 'Qwen21Sampler') return
    const onExecuted = nodeType.prototype.onExecuted
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments)
      const text = (output?.text ?? []).join('\n')
      if (!text) return
      let widget = this.widgets?.find(w => w.name === WIDGET)
      if (!widget) {
        widget = ComfyWidgets.STRING(this, WIDGET, ['STRING', { multiline: true }], app).widget
        widget.serialize = false // not part of the workflow, nor of the prompt
        widget.options.serialize = false
        if (widget.inputEl) widget.inputEl.readOnly = true
        this.setSize([this.size[0], this.size[1] + 90])
      }
      widget.value = text
    }
  }
})
