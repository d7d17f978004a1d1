// Opens ComfyUI's canvas, loads one of our templates, runs it, and prints what happened as one line of JSON.
// node browser.mjs SERVER PACK TEMPLATE WIDGETS VUE SHOT   (WIDGETS: JSON of {node type: {widget: value}}, VUE: on | off)
// playwright-core is found by NODE_PATH; Debian's chromium by CHROMIUM.
import { createRequire } from 'node:module'

const require = createRequire(process.env.NODE_PATH + '/')
const { chromium } = require('playwright-core')
const [server, pack, template, widgets, vue, shot] = process.argv.slice(2)
const flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
  '--disable-background-networking', '--disable-component-update', '--disable-sync']

const set = (name, value) => fetch(`${server}/api/settings/${name}`, { method: 'POST', body: JSON.stringify(value) })
await set('Comfy.TutorialCompleted', true) // or a welcome dialog covers the canvas
await set('Comfy.VueNodes.Enabled', vue === 'on')

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', args: flags })
const page = await browser.newPage({ viewport: { width: 1920, height: 1080 } })
const errors = []
page.on('console', message => message.type() === 'error' && errors.push(message.text() + ' ' + message.location().url))
page.on('pageerror', error => errors.push(error.stack))
await page.goto(server)
await page.waitForFunction(() => window.app?.canvas, null, { timeout: 60000 })
await page.waitForTimeout(2000)

const url = `${server}/api/workflow_templates/${pack}/${template}.json`
const nodes = await page.evaluate(async ([url, widgets]) => {
  await window.app.loadGraphData(await (await fetch(url)).json())
  const graph = window.app.rootGraph ?? window.app.graph
  for (const node of graph._nodes)
    for (const [name, value] of Object.entries(widgets[node.type] ?? {})) {
      const widget = node.widgets.find(w => w.name === name)
      widget.value = value
      widget.callback?.(value)
    }
  return graph._nodes.map(n => ({ type: n.type, missing: n.has_errors === true && !n.widgets?.length, size: n.size }))
}, [url, JSON.parse(widgets)])
await page.keyboard.press('.') // fit the graph into view
await page.waitForTimeout(1000)

const before = Object.keys(await (await fetch(`${server}/history`)).json())
await page.getByTestId('queue-button').first().click()
let outcome = 'nothing ran'
for (let i = 0; i < 300 && outcome === 'nothing ran'; i++) {
  await page.waitForTimeout(200)
  const history = await (await fetch(`${server}/history`)).json()
  const id = Object.keys(history).find(key => !before.includes(key))
  if (id && history[id].status?.completed !== undefined) outcome = history[id].status.status_str
}
await page.waitForTimeout(1500)
if (shot) await page.screenshot({ path: shot })
const report = await page.evaluate(() => (window.app.rootGraph ?? window.app.graph)._nodes
  .flatMap(n => n.type === 'Qwen21Sampler' ? n.widgets : []).find(w => w.name === 'what_ran')?.value ?? '')

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
await browser.close()
// The frontend looks for a page in the user's language first, docs/<id>/en.md, and logs that it is not there.
const ours = errors.filter(e => e.includes(pack) && !/\/docs\/\w+\/\w+\.md/.test(e))
console.log(JSON.stringify({ nodes, outcome, help, opened, report, errors: ours }))
