// Shows the sampler's report on its node: ComfyUI sends the text, but draws no widget for it by itself.
import { app } from '../../scripts/app.js'
import { ComfyWidgets } from '../../scripts/widgets.js'

const WIDGET = 'what_ran'

app.registerExtension({
  name: 'Qwen21.Report',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== 'Qwen21Sampler') return
    const { onNodeCreated, onExecuted } = nodeType.prototype
    // Made with the node: Vue nodes do not draw widgets that come later.
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.apply(this, arguments)
      const options = { multiline: true, placeholder: 'What ran is shown here.' }
      const { widget } = ComfyWidgets.STRING(this, WIDGET, ['STRING', options], app)
      widget.serialize = false // not part of the workflow, nor of the prompt
      widget.options.serialize = false
      widget.options.read_only = true
      if (widget.inputEl) widget.inputEl.readOnly = true
      widget.value = ''
    }
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments)
      const widget = this.widgets?.find(w => w.name === WIDGET)
      if (widget && output?.text) widget.value = output.text.join('\n')
    }
  }
})
