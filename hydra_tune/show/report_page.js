// Draws the report's timeline and memory on canvases, sorts its table, and shows Optuna's plots.
// `data` holds columns of equal length, one entry a span; starts are differences, in microseconds.
"use strict"

const KINDS = ["run", "promote", "spill", "stall"]
const ROW = {height: 24, gap: 4}
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const seconds = us => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us + " µs"
const bytes = n => n >= 2 ** 30 ? (n / 2 ** 30).toFixed(2) + " GiB" : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : (n / 1024).toFixed(1) + " KiB"

// A chart of memory as [from, to, bytes], in pixels. Where several samples are within a pixel, it has the most of them.
function stairs(samples, left, right) {
  const bars = []
  let x = left, used = 0, most = 0
  const until = to => {
    if (to - x < 1) return
    bars.push([x, x + 1, most], [x + 1, to, used])
    x = to
    most = used
  }
  for (const [at, now] of samples) {
    until(Math.min(at, right))
    used = now
    most = at <= left ? now : Math.max(most, now)
  }
  until(right)
  return bars
}

async function unpacked(id) {
  const text = document.getElementById(id).textContent.trim()
  const packed = Uint8Array.from(atob(text), c => c.charCodeAt(0))
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))
  return new Response(stream).text()
}

class Timeline {
  constructor(run) {
    this.run = run
    this.names = new Map(run.names.map(([trial, name]) => [trial, name]))
    this.colours = new Map(run.names.map(([trial, , colour]) => [trial, colour]))
    this.canvas = document.getElementById("timeline")
    this.memory = document.getElementById("memory")
    this.hidden = new Set()
    this.rows = this.rowsOf(run)
    this.whole = [0, Math.max(1, run.end_us)]
    this.view = [...this.whole]
    this.listen()
    this.legend()
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement)
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw())
    this.draw()
  }

  // ---- data ----

  rowsOf(run) {
    const {spans} = run, rows = []
    for (const name of run.devices) for (const kind of ["", "promotes", "spills"]) rows.push({label: kind || name, of: [], longest: 0})
    this.start = new Float64Array(spans.start.length)
    let at = 0
    spans.start.forEach((step, i) => {
      this.start[i] = at += step
      const kind = spans.kind[i], row = rows[3 * spans.device[i] + (kind === 3 ? 0 : kind)]
      row.of.push(i)
      row.longest = Math.max(row.longest, spans.length[i])
    })
    return rows
  }

  // The first span of a row that may reach beyond `from`.
  first(row, from) {
    let low = 0, high = row.of.length
    while (low < high) {
      const middle = (low + high) >> 1
      if (this.start[row.of[middle]] < from - row.longest) low = middle + 1
      else high = middle
    }
    return low
  }

  // ---- drawing ----

  draw() {
    const pen = this.pen(this.canvas, this.rows.length * (ROW.height + ROW.gap) + 22)
    this.rows.forEach((row, i) => this.drawRow(pen, row, i * (ROW.height + ROW.gap)))
    this.axis(pen, this.rows.length * (ROW.height + ROW.gap))
    this.drawMemory()
  }

  pen(canvas, height) {
    const scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth - 38
    Object.assign(canvas, {width: width * scale, height: height * scale})
    canvas.style.height = height + "px"
    const pen = canvas.getContext("2d")
    pen.scale(scale, scale)
    pen.font = "12px system-ui, sans-serif"
    pen.textBaseline = "middle"
    this.left = Math.max(70, ...this.rows.map(row => pen.measureText(row.label).width + 14))
    this.width = width
    return pen
  }

  x(us) { return this.left + (us - this.view[0]) / (this.view[1] - this.view[0]) * (this.width - this.left) }
  us(x) { return this.view[0] + (x - this.left) / (this.width - this.left) * (this.view[1] - this.view[0]) }

  drawRow(pen, row, y) {
    const {spans} = this.run
    pen.fillStyle = css("--soft")
    pen.textAlign = "right"
    pen.fillText(row.label, this.left - 8, y + ROW.height / 2)
    pen.fillStyle = css("--card")
    pen.fillRect(this.left, y, this.width - this.left, ROW.height)
    let pixel = -1, shares = new Map()
    const flush = () => {
      let best = null
      for (const [key, share] of shares) if (!best || share > best[1]) best = [key, share]
      if (best) this.bar(pen, best[0], pixel, 1, y, Math.min(1, .35 + best[1]))
      shares = new Map()
    }
    for (let n = this.first(row, this.view[0]); n < row.of.length; n++) {
      const i = row.of[n], start = this.start[i]
      if (start > this.view[1]) break
      const key = spans.kind[i] === 3 ? "stall" : 4 * spans.trial[i] + spans.kind[i]
      if (key !== "stall" && this.hidden.has(spans.trial[i])) continue
      const x0 = Math.max(this.left, this.x(start)), x1 = Math.min(this.width, this.x(start + spans.length[i]))
      if (x1 <= this.left) continue
      if (x1 - x0 >= 1) { this.bar(pen, key, x0, x1 - x0, y, 1); continue }
      if (Math.floor(x0) !== pixel) { flush(); pixel = Math.floor(x0) }
      shares.set(key, (shares.get(key) || 0) + x1 - x0)
    }
    flush()
  }

  bar(pen, key, x, width, y, alpha) {
    pen.globalAlpha = alpha
    pen.fillStyle = key === "stall" ? css("--stall") : this.colours.get(key >> 2)
    pen.fillRect(x, y, Math.max(width, 1), ROW.height)
    pen.globalAlpha = 1
    if (key !== "stall" && (key & 3)) {
      pen.fillStyle = this.hatch(pen, key & 3)
      pen.fillRect(x, y, width, ROW.height)
    }
  }

  hatch(pen, kind) {
    this.hatches ||= {}
    if (!this.hatches[kind]) {
      const tile = Object.assign(document.createElement("canvas"), {width: 6, height: 6}), ink = tile.getContext("2d")
      ink.strokeStyle = "#fff9"
      ink.lineWidth = 1.5
      ink.beginPath()
      for (const shift of [-6, 0, 6]) kind === 1 ? (ink.moveTo(shift, 6), ink.lineTo(shift + 6, 0)) : (ink.moveTo(shift, 0), ink.lineTo(shift + 6, 6))
      ink.stroke()
      this.hatches[kind] = tile
    }
    return pen.createPattern(this.hatches[kind], "repeat")
  }

  axis(pen, y) {
    const span = this.view[1] - this.view[0]
    let step = 10 ** Math.floor(Math.log10(span / 6))
    while (span / step > 10) step *= span / step > 25 ? 5 : 2
    pen.fillStyle = css("--soft")
    pen.textAlign = "center"
    const digits = Math.max(0, 6 - Math.floor(Math.log10(step)))
    for (let at = Math.ceil(this.view[0] / step) * step; at <= this.view[1]; at += step) {
      const x = this.x(at)
      pen.fillRect(x, y, 1, 4)
      if (x < this.width - 24) pen.fillText((at / 1e6).toFixed(digits) + " s", x, y + 13)
    }
  }

  drawMemory() {
    const height = 74, {devices, budgets, memory} = this.run
    const pen = this.pen(this.memory, devices.length * height + 22)
    devices.forEach((name, number) => {
      const top = number * height + 8, tall = height - 20, most = budgets[number] * 1.08
      const y = used => top + tall * (1 - used / most)
      pen.fillStyle = css("--soft")
      pen.textAlign = "right"
      pen.fillText(name, this.left - 8, top + tall / 2)
      pen.fillText(bytes(budgets[number]), this.left - 8, y(budgets[number]) + 2)
      pen.setLineDash([4, 3])
      pen.strokeStyle = css("--soft")
      pen.beginPath(); pen.moveTo(this.left, y(budgets[number])); pen.lineTo(this.width, y(budgets[number])); pen.stroke()
      pen.setLineDash([])
      pen.fillStyle = pen.strokeStyle = css("--ink")
      const area = new Path2D(), samples = memory[number].map(([at, used]) => [this.x(at), used])
      for (const [from, to, used] of stairs(samples, this.left, this.width)) area.rect(from, y(used), to - from, y(0) - y(used))
      pen.globalAlpha = .45
      pen.fill(area)
      pen.globalAlpha = 1
    })
    this.axis(pen, devices.length * height)
  }

  legend() {
    const place = document.getElementById("legend")
    const sample = (style, text) => `<span><span class="sample" style="${style}"></span>${text}</span>`
    const hatch = angle => `background:repeating-linear-gradient(${angle}deg,#888 0 3px,#ccc 3px 5px)`
    place.innerHTML = sample("background:#888", "computes") + sample(hatch(135), "promotes: a shard to the device")
      + sample(hatch(45), "spills: gradients to the host") + sample("background:var(--stall)", "stalled: trials are there, none computes")
    for (const [trial, name, colour] of this.run.names) {
      const button = document.createElement("button")
      button.innerHTML = `<span class="dot" style="background:${colour}"></span>`
      button.append(name)
      button.title = "hide or show"
      button.onclick = () => {
        button.classList.toggle("off") ? this.hidden.add(trial) : this.hidden.delete(trial)
        this.draw()
      }
      place.append(button)
    }
  }

  // ---- mouse ----

  listen() {
    const {canvas} = this
    canvas.onwheel = event => {
      event.preventDefault()
      this.zoom(this.us(event.offsetX), Math.exp(event.deltaY * .0015))
    }
    canvas.ondblclick = () => { this.view = [...this.whole]; this.draw() }
    canvas.onpointerdown = event => { this.drag = {x: event.offsetX, view: [...this.view]}; canvas.setPointerCapture(event.pointerId) }
    canvas.onpointerup = () => { this.drag = null }
    canvas.onpointermove = event => this.drag ? this.move(event.offsetX) : this.tell(event)
    canvas.onpointerleave = () => { document.getElementById("tip").style.display = "none" }
  }

  zoom(about, factor) {
    const [from, to] = this.view, length = Math.min(this.whole[1], Math.max(20, (to - from) * factor))
    const start = about - (about - from) * length / (to - from)
    this.show(start, length)
  }

  move(x) {
    const {view} = this.drag, length = view[1] - view[0]
    this.show(view[0] - (x - this.drag.x) / (this.width - this.left) * length, length)
  }

  show(start, length) {
    start = Math.max(0, Math.min(start, this.whole[1] - length))
    this.view = [start, start + length]
    this.draw()
  }

  tell(event) {
    const tip = document.getElementById("tip"), row = this.rows[Math.floor(event.offsetY / (ROW.height + ROW.gap))]
    const at = this.us(event.offsetX), near = this.us(event.offsetX + 1) - at, {spans} = this.run
    let found = -1
    if (row && at >= this.view[0]) {
      for (let n = this.first(row, at); n < row.of.length && this.start[row.of[n]] <= at + near; n++) {
        const i = row.of[n]
        if (this.start[i] + spans.length[i] >= at && !this.hidden.has(spans.trial[i])) found = i
      }
    }
    tip.style.display = found < 0 ? "none" : "block"
    if (found < 0) return
    tip.textContent = this.words(found)
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px"
    tip.style.top = event.clientY + 16 + "px"
  }

  words(i) {
    const {spans, causes} = this.run, when = `from ${seconds(this.start[i])}, for ${seconds(spans.length[i])}`
    if (spans.kind[i] === 3) return `stalled: ${causes[spans.cause[i]]}\n${when}`
    const pass = spans.backward[i] ? "backward" : "forward"
    return `${this.names.get(spans.trial[i])}: ${KINDS[spans.kind[i]]}, shard ${spans.shard[i]}, ${pass} of step ${spans.step[i]}\n${when}`
  }
}

function sortable(table) {
  const body = table.tBodies[0]
  table.tHead.querySelectorAll("th").forEach((head, column) => {
    let up = false
    head.onclick = () => {
      up = !up
      const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent
      const order = (a, b) => isFinite(a) && isFinite(b) && a !== "" && b !== "" ? a - b : a.localeCompare(b, undefined, {numeric: true})
      const rows = [...body.rows].sort((a, b) => order(key(a), key(b)))
      body.append(...(up ? rows : rows.reverse()))
    }
  })
}

async function plots() {
  const places = [...document.querySelectorAll(".plot")]
  if (!places.length) return
  const library = document.createElement("script")
  library.textContent = await unpacked("plotly")
  document.head.append(library)
  for (const place of places) {
    const {data, layout} = JSON.parse(place.querySelector("script").textContent)
    const axis = {gridcolor: css("--line"), zerolinecolor: css("--line")}
    const template = {...layout.template, layout: {...layout.template?.layout, xaxis: axis, yaxis: axis}}
    const plain = {
      template, title: "", autosize: true, margin: {t: 30}, font: {color: css("--text")},
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", modebar: {bgcolor: "transparent", color: css("--soft")}
    }
    await Plotly.newPlot(place, data, {...layout, ...plain}, {displaylogo: false, responsive: true})
  }
}

async function main() {
  sortable(document.getElementById("trials"))
  if (!window.DecompressionStream) {
    document.getElementById("legend").textContent = "This browser is too old for the timeline: it has no DecompressionStream."
    return
  }
  window.timeline = new Timeline(JSON.parse(await unpacked("data")))
  await plots()
}

main()
