"use strict";
// Draws the report from the facts in this page. Text from the facts only ever becomes text nodes (or text that
// the chart library draws as text): no name of a module can become markup.

const facts = JSON.parse(document.getElementById("facts").textContent);
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------- small things

function make(tag, options = {}, ...children) {
  const { className, ...attributes } = options;
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = Math.abs(count), unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${count < 0 ? "-" : ""}${unit ? size.toFixed(1) : size} ${units[unit]}`;
}

function seconds(count) {
  if (count === null || count === undefined) return "–";
  const size = Math.abs(count);
  if (size >= 1) return `${count.toFixed(2)} s`;
  if (size >= 1e-3) return `${(count * 1e3).toFixed(1)} ms`;
  return `${(count * 1e6).toFixed(0)} us`;
}

// Axis ticks at round numbers of the unit that the largest value is read in.
function byteAxis(largest) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(largest, 1)) / 10)));
  const unit = 1024 ** power;
  const raw = largest / unit / 5;
  const magnitude = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * magnitude).find((candidate) => candidate >= raw);
  const digits = step % 1 ? (step * 10) % 1 ? 2 : 1 : 0;
  return {
    interval: step * unit,
    axisLabel: { formatter: (value) => `${(value / unit).toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}` },
  };
}

// Of a long name the end says most: "layers.31".
const short = (label) => { const tail = label.split(".").slice(-2).join("."); return tail.length > 18 ? `…${tail.slice(-17)}` : tail; };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const narrow = () => window.innerWidth < 640;
const ratio = facts.plain_seconds ? facts.predicted_seconds / facts.plain_seconds : null;

function tip(title, rows, note) {
  const table = make("table");
  for (const [name, value, key] of rows) {
    const mark = key ? make("span", { className: "key" }) : null;
    if (mark) mark.style.background = colour(key);
    table.append(make("tr", {}, make("td", {}, mark, name), make("td", { className: "number" }, value)));
  }
  return make("div", { className: "tip" }, make("b", {}, title), table, note ? make("p", {}, note) : null);
}

// ------------------------------------------------------------------------------------------- header and cards

function header() {
  $("model").textContent = facts.model;
  $("signature").textContent = facts.signature;
  const found = Object.fromEntries(facts.environment);
  const chips = [found.device, `torch ${found.torch}`, `remat ${found.remat}`, `may ${facts.allow.join(", ")}`];
  if (found.bytes.startsWith("estimated")) chips.unshift("an estimate: nothing was measured");
  $("chips").append(...chips.map((text) => make("li", {}, text)));
}

function card(title, value, detail, kind = "") {
  return make("div", { className: `card ${kind}` }, make("h3", {}, title), make("strong", {}, value), make("p", {}, detail));
}

function cards() {
  const fits = facts.predicted_peak_bytes <= facts.budget_bytes;
  const saved = 1 - facts.predicted_peak_bytes / facts.plain_peak_bytes;
  const measured = facts.measured_peak_bytes === null ? "" : `, measured ${bytes(facts.measured_peak_bytes)}`;
  const extra = facts.predicted_seconds - facts.plain_seconds;
  const slow = ratio === null ? "unknown" : `${ratio.toFixed(3)}×`;
  $("cards").append(
    card("Budget", bytes(facts.budget_bytes), fits ? "kept, by prediction" : "exceeded, by prediction", fits ? "" : "bad"),
    card("Peak", bytes(facts.predicted_peak_bytes), `predicted${measured}`),
    card("Memory saved", `${(100 * saved).toFixed(0)} %`, `the plain step peaks at ${bytes(facts.plain_peak_bytes)}`),
    card("Time per step", slow, `${seconds(Math.abs(extra))} ${extra < 0 ? "less" : "more"}, predicted`),
  );
  const bitwise = facts.verification !== null && facts.verification.startsWith("equal bit for bit");
  const nothing = facts.verification !== null && facts.verification.startsWith("nothing compared");
  const word = facts.verification === null ? "Not run" : nothing ? "Not compared" : bitwise ? "Bit-equal" : facts.verified ? "Equal" : "Different";
  const detail = facts.verification === null ? "remat.fit and remat.verify compare them" : facts.verification.replace(/^.*?: /, "");
  $("cards").append(card("Gradients", word, detail, nothing ? "" : facts.verified ? "good" : facts.verified === false ? "bad" : ""));
}

// ------------------------------------------------------------------------------------------------- charts

const PARTS = [["parameters", "parameters"], ["optimizer", "optimizer"], ["gradients", "gradients"],
  ["kept", "activations kept"], ["moving", "on the link"], ["working", "working set"]];
const charts = [];

// On a phone the tooltip goes below the chart, where no finger is.
const below = (point, params, element, rect, size) => [(size.viewSize[0] - size.contentSize[0]) / 2, size.viewSize[1] + 4];

function base() {
  const axis = { axisLine: { lineStyle: { color: colour("line") } }, axisTick: { show: false },
    axisLabel: { color: colour("quiet"), fontSize: 12 }, splitLine: { lineStyle: { color: colour("line") } } };
  return {
    axis,
    option: {
      animation: false,
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("ink") },
      grid: { left: 8, right: 16, top: 56, bottom: 8, containLabel: true },
      legend: { type: "scroll", left: 0, right: 0, top: 4, icon: "roundRect", itemWidth: 12, itemHeight: 12, itemGap: 16,
        textStyle: { color: colour("ink"), fontSize: 13 }, pageTextStyle: { color: colour("quiet") } },
      tooltip: { ...(narrow() ? { position: below } : { confine: true }), backgroundColor: colour("panel"), borderColor: colour("line"), padding: [10, 12],
        textStyle: { color: colour("ink") }, extraCssText: "box-shadow:0 6px 24px rgb(0 0 0 / 18%);border-radius:10px" },
    },
  };
}

// The step from left to right; ticks are regions, evenly spread.
function stepAxis(axis) {
  const points = facts.timeline.points;
  const named = points.map((point, index) => (point.region === null ? -1 : index)).filter((index) => index >= 0);
  const wanted = narrow() ? 4 : 9;
  const ticks = new Set(Array.from({ length: wanted }, (_, i) => named[Math.round(((i + 0.5) * (named.length - 1)) / wanted)]));
  return {
    ...axis, type: "category", boundaryGap: false, data: points.map((point) => point.label),
    axisLabel: { ...axis.axisLabel, interval: (index) => ticks.has(index), hideOverlap: true,
      formatter: (label, index) => short(facts.regions[points[index].region]?.label ?? label) },
  };
}

// What lives at one point of the step: its parts, and the regions that hold memory there.
function alive(index) {
  const point = facts.timeline.points[index];
  const holders = facts.regions.filter((r) => r.born !== null && r.born <= index && index <= r.gone && r.kept_bytes > 0);
  const held = holders.reduce((sum, r) => sum + r.kept_bytes, 0);
  const names = holders.length > 1 ? `${holders[0].label} to ${holders[holders.length - 1].label}` : holders.map((r) => r.label).join("");
  const rows = PARTS.filter(([key]) => point[key]).map(([key, name]) => [name, bytes(point[key]), key]).reverse();
  rows.unshift(["at its peak", bytes(point.peak_bytes)]);
  rows.push([facts.timeline.plain, bytes(facts.timeline.plain_peak_bytes[index]), "plain-line"]);
  const note = holders.length ? `${holders.length} ${holders.length > 1 ? "regions hold" : "region holds"} ${bytes(held)}: ${names}` : "";
  return { title: point.label, rows, note };
}

function memoryOption() {
  const { option, axis } = base();
  const points = facts.timeline.points;
  const tallest = Math.max(facts.budget_bytes, facts.plain_peak_bytes, ...facts.timeline.plain_peak_bytes);
  const phases = [];
  points.forEach((point, index) => {
    const last = phases[phases.length - 1];
    if (last && last.phase === point.phase) last.end = index;
    else phases.push({ phase: point.phase, start: index, end: index });
  });
  const peak = points.reduce((best, point, index) => (point.peak_bytes > points[best].peak_bytes ? index : best), 0);
  const series = PARTS.filter(([key]) => points.some((point) => point[key] > 0)).map(([key, name]) => ({
    name, type: "line", stack: "step", symbol: "none", z: 3, lineStyle: { width: 0 }, color: colour(key),
    areaStyle: { opacity: 1 }, emphasis: { disabled: true }, data: points.map((point) => Math.max(point[key], 0)),
  }));
  series[series.length - 1].markPoint = {
    symbol: "circle", symbolSize: 9, z: 6, itemStyle: { color: colour("ink"), borderColor: colour("panel"), borderWidth: 2 },
    label: { show: true, position: "top", distance: 8, color: colour("ink"), fontSize: 12, fontWeight: 600,
      formatter: `peak ${bytes(facts.predicted_peak_bytes)}`, textBorderColor: colour("panel"), textBorderWidth: 3 },
    data: [{ coord: [peak, points[peak].peak_bytes] }],
  };
  series.unshift({
    name: facts.timeline.plain, type: "line", symbol: "none", z: 1, color: colour("plain-line"),
    lineStyle: { width: 1.5, type: "dashed", color: colour("plain-line") }, areaStyle: { color: colour("plain"), opacity: 0.65 },
    emphasis: { disabled: true }, data: facts.timeline.plain_peak_bytes,
    markLine: {
      silent: true, symbol: "none", z: 5, lineStyle: { color: colour("budget"), width: 2, type: "solid" },
      label: { position: "insideStartTop", color: colour("budget"), fontWeight: 600, formatter: `budget ${bytes(facts.budget_bytes)}`,
        textBorderColor: colour("panel"), textBorderWidth: 3 },
      data: [{ yAxis: facts.budget_bytes }],
    },
    markArea: {
      silent: true, z: 0, itemStyle: { color: "transparent", borderColor: colour("line"), borderWidth: 1 },
      label: { color: colour("quiet"), fontSize: 12, position: "insideTop" },
      data: phases.filter((p) => p.end > p.start).map((p) => [{ xAxis: p.start, name: p.phase }, { xAxis: p.end }]),
    },
  });
  const faint = { color: colour("plain"), borderColor: colour("plain-line"), borderWidth: 1, borderType: "dashed" };
  return {
    ...option,
    legend: { ...option.legend, data: series.map(({ name }, index) => (index ? { name } : { name, itemStyle: faint })) },
    tooltip: { ...option.tooltip, trigger: "axis", axisPointer: { lineStyle: { color: colour("ink"), opacity: 0.5 } },
      formatter: ([first]) => { const { title, rows, note } = alive(first.dataIndex); return tip(title, rows, note); } },
    xAxis: stepAxis(axis),
    yAxis: { ...axis, type: "value", min: 0, max: 1.06 * tallest, ...byteAxis(1.06 * tallest),
      axisLabel: { ...axis.axisLabel, ...byteAxis(1.06 * tallest).axisLabel, showMaxLabel: false } },
    series,
  };
}

function tradeOption() {
  const { option, axis } = base();
  const slow = (row) => row.seconds / (facts.plain_seconds || row.seconds);
  const place = (row) => ({ name: row.strategy, value: [row.peak_bytes, slow(row)], row });
  const others = facts.trade_off.strategies.slice(1).filter((row) => row.strategy !== "none" && !row.strategy.startsWith("optimal"));
  const frontier = facts.trade_off.frontier.map((row) => ({ value: [row.peak_bytes, slow(row)], row }));
  const plan = { value: [facts.predicted_peak_bytes, ratio ?? 1], row: { peak_bytes: facts.predicted_peak_bytes, seconds: facts.predicted_seconds } };
  const plain = { value: [facts.plain_peak_bytes, 1], row: { peak_bytes: facts.plain_peak_bytes, seconds: facts.plain_seconds } };
  const all = [...frontier, ...others.map(place), plan, plain, { value: [facts.budget_bytes, 1] }];
  const low = Math.min(...all.map((p) => p.value[0])), high = Math.max(...all.map((p) => p.value[0]));
  const top = Math.max(...all.map((p) => p.value[1])), bottom = Math.min(...all.map((p) => p.value[1]));
  const rise = Math.max(top - bottom, 0.01);
  const label = (text, position) => ({ show: true, position, distance: 8, formatter: text, color: colour("ink"), fontSize: 12,
    fontWeight: 600, textBorderColor: colour("panel"), textBorderWidth: 3 });
  const pad = Math.max(high - low, 1) * 0.07;
  const step = byteAxis((narrow() ? 1.8 : 1) * (high - low + pad)).interval;
  return {
    ...option,
    grid: { ...option.grid, bottom: 30, left: 14, top: 74, right: 26 },
    tooltip: { ...option.tooltip, trigger: "item", formatter: ({ data, seriesName, name }) => data && data.row
      ? tip(name || seriesName, [["peak", bytes(data.row.peak_bytes)], ["time", seconds(data.row.seconds)], ["slowdown", `${slow(data.row).toFixed(3)}×`]],
        data.row.feasible === false ? "does not fit the budget" : "") : "" },
    xAxis: { ...axis, type: "value", name: "peak of the step", nameLocation: "middle", nameGap: 32, nameTextStyle: { color: colour("quiet") },
      min: Math.max(0, Math.floor((low - pad) / step) * step), max: high + pad, interval: step,
      axisLabel: { ...axis.axisLabel, ...byteAxis(high).axisLabel, showMaxLabel: false, hideOverlap: true } },
    yAxis: { ...axis, type: "value", name: narrow() ? "" : "time, plain step = 1", nameTextStyle: { color: colour("quiet"), align: "left" }, min: bottom - 0.06 * rise, max: bottom + 1.12 * rise,
      axisLabel: { ...axis.axisLabel, showMinLabel: false, showMaxLabel: false, formatter: (value) => `${value.toFixed(rise < 0.1 ? 3 : 2)}×` } },
    series: [
      { name: facts.trade_off.offload ? "best without offload" : "best possible", type: "line", z: 3, color: colour("kept"), data: frontier, symbolSize: 6, lineStyle: { width: 2.5 },
        areaStyle: { opacity: 0.06, origin: "start" },
        markLine: { silent: true, symbol: "none", lineStyle: { color: colour("budget"), width: 2, type: "solid" },
          label: { formatter: `budget ${bytes(facts.budget_bytes)}`, color: colour("budget"), fontWeight: 600, position: "end", distance: 4 },
          data: [{ xAxis: facts.budget_bytes }] } },
      { name: "by hand", type: "scatter", z: 4, symbolSize: 10, color: colour("gradients"),
        data: others.map((row) => ({ ...place(row), itemStyle: row.feasible ? { opacity: 1 } : { opacity: 1, color: colour("panel"), borderColor: colour("gradients"), borderWidth: 2 },
          label: row.strategy === "full" ? label("every region", "right") : undefined })) },
      { name: "plain step", type: "scatter", z: 5, symbolSize: 12, color: colour("plain-line"), itemStyle: { opacity: 1 }, data: [{ ...plain, label: label("plain", "top") }] },
      { name: "this plan", type: "scatter", z: 6, symbol: "diamond", symbolSize: 20, color: colour("working"),
        itemStyle: { borderColor: colour("panel"), borderWidth: 2, opacity: 1 }, data: [{ ...plan, label: label("this plan", "right") }] },
    ],
  };
}

function linkRows(index) {
  const row = facts.link.points[index];
  return [["to the host", bytes(row.to_host_bytes), "offloaded"], ["back from it", bytes(row.from_host_bytes), "kept"],
    ["waiting on the host", bytes(row.on_host_bytes), "plain-line"], ["compute waits", seconds(row.waited_seconds)]];
}

function linkOption() {
  const { option, axis } = base();
  const points = facts.link.points;
  const busiest = Math.max(1, ...points.map((row) => Math.max(row.to_host_bytes, row.from_host_bytes)));
  const fullest = Math.max(1, ...points.map((row) => row.on_host_bytes));
  const scale = (largest) => ({ ...axis, type: "value", min: 0, max: 1.1 * largest, ...byteAxis(largest),
    axisLabel: { ...axis.axisLabel, ...byteAxis(largest).axisLabel, showMaxLabel: false } });
  const bar = (name, key, tint) => ({ name, type: "bar", stack: "link", color: colour(tint), barCategoryGap: "8%", data: points.map((row) => row[key]) });
  return {
    ...option,
    tooltip: { ...option.tooltip, trigger: "axis", formatter: ([first]) => tip(facts.timeline.points[first.dataIndex].label,
      linkRows(first.dataIndex), `${seconds(points[first.dataIndex].start_seconds)} after the first region began`) },
    xAxis: { ...stepAxis(axis), boundaryGap: true, data: points.map((_, index) => facts.timeline.points[index].label) },
    yAxis: [scale(busiest), { ...scale(fullest), splitLine: { show: false }, show: !narrow() }],
    series: [bar("to the host", "to_host_bytes", "offloaded"), bar("back from it", "from_host_bytes", "kept"),
      { name: narrow() ? "waiting on the host" : "waiting on the host (right)", type: "line", yAxisIndex: 1, symbol: "none", color: colour("plain-line"),
        lineStyle: { width: 2 }, areaStyle: { opacity: 0.08 }, data: points.map((row) => row.on_host_bytes) }],
  };
}

// A chart, its tooltip by the arrow keys, and what it says aloud.
function chart(id, option, count, say) {
  const element = $(id);
  const drawn = echarts.init(element, null, { renderer: "svg" });
  let at = -1;
  element.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    at = Math.min(count - 1, Math.max(0, at + moves[event.key]));
    drawn.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: at });
    $(`${id}-live`).textContent = say(at);
  });
  element.addEventListener("blur", () => drawn.dispatchAction({ type: "hideTip" }));
  charts.push(() => { drawn.setOption(option(), true); drawn.resize(); });
  return drawn;
}

function drawAll() { for (const draw of charts) draw(); }

// ------------------------------------------------------------------------------------------------- tables

function sortable(table, columns, rows, render) {
  let by = null, down = false;
  const head = make("tr");
  const body = make("tbody");
  const fill = () => {
    const order = by === null ? rows : [...rows].sort((a, b) => {
      const [x, y] = [by.value(a), by.value(b)];
      const order = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return down ? -order : order;
    });
    body.replaceChildren(...order.flatMap(render));
  };
  for (const column of columns) {
    const cell = make("th", { scope: "col", className: `${column.number ? "number" : ""} ${column.value ? "" : "plain"}` });
    if (column.value) {
      const button = make("button", { type: "button" }, column.name);
      button.addEventListener("click", () => {
        down = by === column ? !down : Boolean(column.number);
        by = column;
        for (const other of head.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        fill();
      });
      cell.append(button);
    } else {
      cell.textContent = column.name;
    }
    head.append(cell);
  }
  table.replaceChildren(make("thead", {}, head), body);
  fill();
  return fill;
}

const number = (text, label) => make("td", label ? { className: "number", "data-label": label } : { className: "number" }, text);

function meter(row) {
  const total = row.saved_bytes || 1;
  const bar = make("div", { className: "meter", role: "img",
    "aria-label": `${bytes(row.kept_bytes)} kept, ${bytes(row.recomputed_bytes)} recomputed, ${bytes(row.offloaded_bytes)} on the host` });
  for (const [key, name] of [["kept_bytes", "kept"], ["recomputed_bytes", "recomputed"], ["offloaded_bytes", "offloaded"]]) {
    const part = make("span", { className: name });
    part.style.width = `${100 * row[key] / total}%`;
    bar.append(part);
  }
  return bar;
}

function tensorTable(group) {
  if (!group || !group.tensors.length) return make("p", { className: "quiet" }, "This region could not be captured: nothing is known of its tensors.");
  const table = make("table");
  const titles = ["tensor", "shape", "action", "bytes", "time", "source", "reason"];
  table.append(make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)))));
  table.append(make("tbody", {}, ...group.tensors.map((t) => make("tr", {},
    make("td", {}, make("code", {}, t.operation)), make("td", {}, make("code", {}, `${t.dtype}[${t.shape.join(", ")}]`)),
    make("td", {}, t.action), number(bytes(t.nbytes)), number(t.seconds ? seconds(t.seconds) : ""),
    make("td", {}, make("code", {}, t.source)), make("td", { className: "reason" }, t.reason)))));
  return table;
}

function regionTable() {
  const hosted = facts.regions.some((row) => row.offloaded_bytes);
  const counted = facts.regions.some((row) => row.measured_bytes !== null);
  for (const id of ["offloaded-key", "offloaded-word"]) $(id).hidden = !hosted;
  const columns = [
    { name: "Region", value: (row) => row.label }, { name: "Way", value: (row) => row.way },
    { name: "Its bytes" }, { name: "Kept", number: true, value: (row) => row.kept_bytes },
    { name: "Recomputed", number: true, value: (row) => row.recomputed_bytes },
    ...(hosted ? [{ name: "On the host", number: true, value: (row) => row.offloaded_bytes }] : []),
    ...(counted ? [{ name: "Held, measured", number: true, value: (row) => row.measured_bytes ?? -1 }] : []),
    { name: "Extra time", number: true, value: (row) => row.extra_seconds }, { name: "Reason" },
  ];
  const open = new Set();
  const matches = (row) => `${row.label} ${row.way} ${row.reason}`.toLowerCase().includes($("search").value.trim().toLowerCase());
  const render = (row) => {
    if (!matches(row)) return [];
    const button = make("button", { type: "button", "aria-expanded": open.has(row.index) }, row.label);
    const line = make("tr", {}, make("td", { className: "name" }, button), make("td", {}, make("span", { className: "way" }, row.way)),
      make("td", { className: "share" }, meter(row)), number(bytes(row.kept_bytes), "kept"), number(bytes(row.recomputed_bytes), "recomputed"),
      hosted ? number(bytes(row.offloaded_bytes), "on the host") : null, counted ? number(bytes(row.measured_bytes), "measured") : null,
      number(row.extra_seconds ? seconds(row.extra_seconds) : "–", "extra"), make("td", { className: "reason" }, row.reason));
    button.addEventListener("click", () => {
      if (!open.delete(row.index)) open.add(row.index);
      refill();
      [...document.querySelectorAll("#region-table td.name button")].find((other) => other.textContent === row.label)?.focus();
    });
    if (!open.has(row.index)) return [line];
    const group = facts.tensors.find((found) => found.kind === row.kind && found.choice === row.choice);
    return [line, make("tr", { className: "detail" }, make("td", { colspan: columns.length }, tensorTable(group)))];
  };
  const fill = sortable($("region-table"), columns, facts.regions, render);
  const refill = () => {
    fill();
    const shown = facts.regions.filter(matches).length;
    $("found").textContent = shown === facts.regions.length ? "" : `· ${shown} of ${facts.regions.length} shown`;
  };
  $("search").addEventListener("input", refill);
}

function strategyTable() {
  const columns = [{ name: "Strategy", value: (row) => row.strategy }, { name: "Peak", number: true, value: (row) => row.peak_bytes },
    { name: "Slowdown", number: true, value: (row) => row.seconds }, { name: "Recomputed", number: true, value: (row) => row.recomputed }, { name: "Fits" }];
  sortable($("strategies"), columns, facts.trade_off.strategies, (row) => [make("tr", { className: row === facts.trade_off.strategies[0] ? "me" : "" },
    make("td", {}, row.strategy), number(bytes(row.peak_bytes)), number(facts.plain_seconds ? `${(row.seconds / facts.plain_seconds).toFixed(3)}×` : "–"),
    number(`${row.recomputed} of ${facts.regions.length}`), make("td", { className: row.feasible ? "yes" : "no" }, row.feasible ? "yes" : "no"))]);
}

function simpleTable(panel, table, columns, rows) {
  if (!rows.length) return;
  $(panel).hidden = false;
  $(table).replaceChildren(
    make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))))));
}

function comparedTable() {
  const read = { bytes, seconds };
  simpleTable("compared-panel", "compared", ["", "Predicted", "Measured", "Measured / predicted"], facts.compared.map((row) => [
    row.what, read[row.unit](row.predicted), read[row.unit](row.measured),
    row.predicted ? (row.measured / row.predicted).toFixed(3) : "–"]));
}

function eventTable() {
  const keys = [...new Set(facts.events.flatMap((event) => Object.keys(event)))];
  simpleTable("events-panel", "events", keys, facts.events.map((event) => keys.map((key) => String(event[key] ?? ""))));
}

function rest() {
  $("environment").append(...facts.environment.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  $("notes-panel").hidden = !facts.notes.length;
  $("notes").append(...facts.notes.map((note) => make("li", {}, note)));
}

// ------------------------------------------------------------------------------------------------- theme

function theme(name) {
  document.documentElement.dataset.theme = name;
  drawAll();
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";

header();
cards();
$("memory-note").textContent = `What is allocated at the peak of each part of the step. It is highest at ${facts.peak_at}.`;
$("trade-note").textContent = "Each point is a way to run this step: the best for every budget, and what people do by hand.";
$("memory").setAttribute("aria-label", `Memory over one step: peak ${bytes(facts.predicted_peak_bytes)} at ${facts.peak_at}, budget ${bytes(facts.budget_bytes)}. Arrow keys move along the step.`);
$("trade").setAttribute("aria-label", `Time against memory: this plan takes ${ratio === null ? "an unknown time" : `${ratio.toFixed(3)} times the plain step`}. The table below has the figures.`);
chart("memory", memoryOption, facts.timeline.points.length, (at) => {
  const { title, rows, note } = alive(at);
  return `${title}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}. ${note}`;
});
chart("trade", tradeOption, facts.trade_off.frontier.length, (at) => {
  const row = facts.trade_off.frontier[at];
  return `peak ${bytes(row.peak_bytes)}, ${seconds(row.seconds)}`;
});
if (facts.link !== null) {
  $("link-panel").hidden = false;
  $("link-note").textContent = `${bytes(facts.link.host_bytes)} of saved tensors wait on the host until backward asks for them; `
    + `compute waits ${seconds(facts.link.waited_seconds)} for the link.`;
  $("link").setAttribute("aria-label", "Bytes that cross the link to the host in each part of the step. Arrow keys move along the step.");
  chart("link", linkOption, facts.link.points.length, (at) =>
    `${facts.timeline.points[at].label}: ${linkRows(at).map(([name, value]) => `${name} ${value}`).join(", ")}`);
}
strategyTable();
regionTable();
comparedTable();
eventTable();
rest();
drawAll();
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
window.addEventListener("resize", drawAll);
