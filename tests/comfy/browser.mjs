// Opens ComfyUI's canvas as a person does, runs one of our templates, and prints what was seen as one line of JSON.
// node browser.mjs JSON, of {server, pack, template, widgets, add, vue, shots}:
//   widgets: {node type: {widget: value}}; add: {node type: {widget: value}} to put beside the template, the MODEL of
//   the loader wired into them; vue: whether Vue nodes draw; shots: folder for screenshots.
// playwright-core is found by NODE_PATH; Debian's chromium by CHROMIUM.
import { createRequire } from 'node:module'

const require = createRequire(process.env.NODE_PATH + '/')
const { chromium } = require('playwright-core')
const { server, pack, template, widgets, add, vue, shots } = JSON.parse(process.argv[2])
const flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
  '--disable-background-networking', '--disable-component-update', '--disable-sync']

const set = (name, value) => fetch(`${server}/api/settings/${name}`, { method: 'POST', body: JSON.stringify(value) })
await set('Comfy.TutorialCompleted', true) // or a welcome dialog covers the canvas
await set('Comfy.VueNodes.Enabled', vue)
await set('Comfy.Workflow.Persist', true)

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', args: flags })
const page = await browser.newPage({ viewport: { width: 1920, height: 1080 } })
const errors = []
page.on('console', message => message.type() === 'error' && errors.push(message.text() + ' ' + message.location().url))
page.on('pageerror', error => errors.push(error.stack))
// The shim is deprecated: what of ours asks for it fails here as it will where it is gone.
await page.route('**/scripts/widgets.js', route => route.fulfill({ status: 404, body: '' }))

async function open() {
  await page.goto(server)
  await page.waitForFunction(() => window.app?.canvas, null, { timeout: 60000 })
  await page.waitForTimeout(2000)
}

const history = async () => (await fetch(`${server}/history`)).json()

async function run() {
  const before = Object.keys(await history())
  await page.getByTestId('queue-button').first().click()
  for (let i = 0; i < 300; i++) {
    await page.waitForTimeout(200)
    const found = await history()
    const id = Object.keys(found).find(key => !before.includes(key))
    if (id && found[id].status?.completed !== undefined) return found[id]
  }
  return { status: { status_str: 'nothing ran' } }
}

/** What our nodes show, by type, and the words on the page, toasts among them; what stands in text boxes is none. */
async function look(name) {
  await page.waitForTimeout(1500)
  if (shots) await page.screenshot({ path: `${shots}/${name}.png` })
  return page.evaluate(() => {
    const nodes = (window.app.rootGraph ?? window.app.graph)._nodes
    const boxes = [...document.querySelectorAll('textarea')].map(box => box.value)
    const prompt = nodes.find(n => n.type === 'Qwen21EncodePrompt')?.widgets.find(w => w.name === 'prompt').value
    const shown = {}
    for (const node of nodes) {
      const widget = node.widgets?.find(w => w.name === 'what_ran')
      if (widget) shown[node.type] = widget.value
    }
    const drawn = Object.fromEntries(Object.entries(shown).map(([type, text]) => [type, boxes.includes(text)]))
    const draws = boxes.includes(prompt) // the first Vue nodes draw no text box, not even core's
    return { shown, drawn, draws, words: document.body.innerText.replace(/\s+/g, ' ') }
  })
}

const command = id => page.evaluate(id => window.app.extensionManager.command.execute(id), id)

await open()
const url = `${server}/api/workflow_templates/${pack}/${template}.json`
const nodes = await page.evaluate(async ([url, widgets, add]) => {
  await window.app.loadGraphData(await (await fetch(url)).json())
  const graph = window.app.rootGraph ?? window.app.graph
  const loader = graph._nodes.find(n => n.type === 'Qwen21LoadDiT')
  Object.keys(add).forEach((type, i) => {
    const node = window.LiteGraph.createNode(type)
    graph.add(node)
    node.pos = [1400 + 480 * i, 750]
    node.setSize([450, 420])
    const socket = node.inputs.findIndex(input => input.type === 'MODEL')
    if (socket < 0) return
    for (const link of loader.outputs[0].links ?? []) {
      const { target_id, target_slot } = graph.links.get?.(link) ?? graph.links[link]
      node.connect(0, graph.getNodeById(target_id), target_slot)
    }
    loader.connect(0, node, socket)
  })
  for (const node of graph._nodes)
    for (const [name, value] of Object.entries({ ...widgets[node.type], ...add[node.type] })) {
      const widget = node.widgets.find(w => w.name === name)
      widget.value = value
      widget.callback?.(value)
    }
  for (const node of graph._nodes) // so that the same workflow can be run again
    for (const widget of node.widgets ?? []) if (widget.name === 'control_after_generate') widget.value = 'fixed'
  return graph._nodes.map(n => ({ type: n.type, missing: n.has_errors === true && !n.widgets?.length, size: n.size }))
}, [url, widgets, add])
await page.keyboard.press('.') // fit the graph into view
await page.waitForTimeout(1000)

const first = await run()
const seen = { run: await look('run') }
await run() // the same once more: ComfyUI serves the sampler from its cache
seen.cached = await look('cached')
await page.mouse.click(960, 1000) // as any click, it makes the canvas keep its state
await command('Comfy.NewBlankWorkflow')
await page.waitForTimeout(1000)
await command('Workspace.PreviousOpenedWorkflow')
seen.switched = await look('switched')
await page.waitForTimeout(1500) // drafts are saved after a while
await open()
seen.reloaded = await look('reloaded')

const help = {}
for (const type of new Set(nodes.map(n => n.type).filter(t => t.startsWith('Qwen21'))))
  help[type] = (await fetch(`${server}/extensions/${pack}/docs/${type}.md`)).status

// The help panel of a node, as a person opens it: select the node, press the button of its toolbox.
await page.evaluate(() => {
  const node = (window.app.rootGraph ?? window.app.graph)._nodes.find(n => n.type === 'Qwen21Sampler')
  window.app.canvas.selectNode(node)
})
await page.getByTestId('info-button').first().dispatchEvent('click') // it may lie outside the window
const sentence = (await (await fetch(`${server}/extensions/${pack}/docs/Qwen21Sampler.md`)).text()).split('\n')[2]
const opened = await page.waitForFunction(
  text => document.body.innerText.replace(/\s+/g, ' ').includes(text), sentence.slice(0, 40), { timeout: 15000 }
).then(() => true, () => false)
const version = await page.evaluate(() => window.__COMFYUI_FRONTEND_VERSION__)
await browser.close()
// The frontend looks for a page in the user's language first, docs/<id>/en.md, and logs that it is not there.
const ours = errors.filter(e => e.includes(pack) && !/\/docs\/\w+\/\w+\.md/.test(e))
const outcome = first.status.status_str
console.log(JSON.stringify({ nodes, outcome, sent: first.prompt?.[2], seen, help, opened, version, errors: ours }))
