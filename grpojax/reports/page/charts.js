// Line charts with intervals, and the picture of rewards by step.
const MARGIN = { left: 50, right: 10, top: 8, bottom: 22 };
const HEIGHT = 184;

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((x) => x * power >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    values.push(+(i * step).toPrecision(12));
  }
  return values;
}

// The range of an axis; leaves out a few outliers that would flatten the rest.
function range(values) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (sorted.length >= 40) {
    const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
    const [a, b] = [at(0.02), at(0.98)];
    if (b > a && high - low > 6 * (b - a)) {
      [low, high] = [Math.max(low, a - (b - a) / 2), Math.min(high, b + (b - a) / 2)];
    }
  }
  if (low >= 0 && low < 0.4 * high) low = 0;
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low === 0 ? 0 : low - pad, high + pad];
}

// All values to draw; a series is {run, label, x, y, low, high, blocks}.
function allValues(series) {
  return series.flatMap((s) => [
    ...(s.y || []), ...(s.low || []), ...(s.high || []),
    ...(s.blocks ? [...s.blocks.low, ...s.blocks.high] : []),
  ]);
}

function line(xs, ys, px, py) {
  let path = "";
  let pen = false;
  xs.forEach((x, i) => {
    if (known(ys[i])) {
      path += `${pen ? "L" : "M"}${px(x).toFixed(1)},${py(ys[i]).toFixed(1)}`;
    }
    pen = known(ys[i]);
  });
  return path;
}

// Area between bounds; a missing upper bound is infinite, so it reaches the top.
function band(xs, low, high, px, py) {
  const there = xs.map((_, i) => i).filter((i) => known(low[i]));
  if (there.length < 2) return "";
  const top = (y) => (known(y) ? py(y) : -HEIGHT).toFixed(1);
  const up = there.map((i) => `${px(xs[i]).toFixed(1)},${top(high[i])}`);
  const down = there.reverse().map(
    (i) => `${px(xs[i]).toFixed(1)},${py(low[i]).toFixed(1)}`);
  return `M${up.join("L")}L${down.join("L")}Z`;
}

function stroke(d, run, width, opacity) {
  const node = svg("path", { d, fill: "none", "stroke-width": width,
    "stroke-opacity": opacity, "stroke-linejoin": "round" });
  node.style.stroke = color(run);
  return node;
}

function filled(d, run) {
  const node = svg("path", { d, "fill-opacity": 0.17, stroke: "none" });
  node.style.fill = color(run);
  return node;
}

function marks(s, px, py) {
  const many = s.x.length > 40;
  return s.x.filter((_, i) => known(s.y[i])).length === 0 || many ? [] :
    s.x.map((x, i) => {
      if (!known(s.y[i])) return null;
      const bar = s.low && known(s.low[i]) && s.x.length === 1 && stroke(
        `M${px(x)},${py(s.low[i])}V${py(s.high[i])}`, s.run, 1.5, 1);
      const node = svg("circle", { cx: px(x), cy: py(s.y[i]), r: 2.4 });
      node.style.fill = color(s.run);
      return [bar, node];
    });
}

function axes(width, xRange, yRange, px, py, format) {
  const nodes = [svg("text", { x: 2, y: HEIGHT - 6 }, "step")];
  for (const y of ticks(yRange[0], yRange[1], 4)) {
    nodes.push(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right,
      y1: py(y), y2: py(y) }));
    nodes.push(svg("text", { x: MARGIN.left - 6, y: py(y) + 4, "text-anchor": "end" },
      format(y)));
  }
  for (const x of ticks(xRange[0], xRange[1], width > 500 ? 8 : 5)) {
    if (!Number.isInteger(x)) continue;
    const edge = px(x) > width - 24;
    nodes.push(svg("text", { x: edge ? width - 2 : px(x), y: HEIGHT - 6,
      "text-anchor": edge ? "end" : "middle" }, x.toLocaleString("en")));
  }
  return nodes;
}

function draw(node, width, series, options) {
  const xs = series.flatMap((s) => [...(s.x || []), ...(s.blocks ? s.blocks.x : [])]);
  let xRange = [xs.reduce((a, b) => Math.min(a, b), Infinity),
    xs.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (xRange[0] === xRange[1]) xRange = [xRange[0] - 1, xRange[1] + 1];
  const yRange = range(allValues(series).concat(options.zero ? [0] : []));
  const px = (x) => MARGIN.left + (x - xRange[0]) / (xRange[1] - xRange[0]) *
    (width - MARGIN.left - MARGIN.right);
  const py = (y) => HEIGHT - MARGIN.bottom - (y - yRange[0]) /
    (yRange[1] - yRange[0]) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const id = `clip${draw.count = (draw.count || 0) + 1}`;
  const inside = svg("g", { "clip-path": `url(#${id})` });
  if (options.zero) {
    inside.append(svg("line", { class: "cursor", x1: MARGIN.left, x2: width, y1: py(0),
      y2: py(0) }));
  }
  for (const s of series) {
    const bold = s.blocks || null;
    if (s.low) inside.append(filled(band(s.x, s.low, s.high, px, py), s.run));
    if (bold) inside.append(filled(band(bold.x, bold.low, bold.high, px, py), s.run));
    if (s.y) inside.append(stroke(line(s.x, s.y, px, py), s.run, bold ? 1 : 1.8,
      bold ? 0.38 : 1));
    if (bold) inside.append(stroke(line(bold.x, bold.mean, px, py), s.run, 2.2, 1));
    if (s.y && !bold) append(inside, [marks(s, px, py)]);
  }
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT -
    MARGIN.bottom, visibility: "hidden" });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
    tabindex: "0", "aria-label": options.label },
    svg("clipPath", { id }, svg("rect", { x: MARGIN.left, y: 0, width: Math.max(0,
      width - MARGIN.left - MARGIN.right + 4), height: HEIGHT - MARGIN.bottom + 3 })),
    axes(width, xRange, yRange, px, py, options.axis), inside, cursor);
  node.replaceChildren(picture);
  follow(picture, cursor, series, options, px, width, xRange);
}

function nearest(xs, x) {
  let best = 0;
  xs.forEach((value, i) => {
    if (Math.abs(value - x) < Math.abs(xs[best] - x)) best = i;
  });
  return best;
}

// Rows of a tooltip: a run's value at a step, and the mean of the step's block.
function rowsAt(s, x, format) {
  const rows = [];
  if (s.y) {
    const i = nearest(s.x, x);
    const bounds = s.low ? ` ${interval(s.low[i], s.high[i], format)}` : "";
    rows.push(tipRow([dot(s.run), s.label], format(s.y[i]) + bounds));
  }
  if (s.blocks) {
    const i = nearest(s.blocks.x, x);
    const bounds = interval(s.blocks.low[i], s.blocks.high[i], format);
    rows.push(tipRow(el("span.soft", null, s.y ? "mean around it" : s.label),
      `${format(s.blocks.mean[i])} ${bounds}`));
  }
  return rows;
}

// Pointer and arrow keys move a cursor; a tooltip shows the values there.
function follow(picture, cursor, series, options, px, width, xRange) {
  const steps = [...new Set(series.flatMap((s) => s.x || s.blocks.x))].sort(
    (a, b) => a - b);
  let at = steps.length - 1;
  const show = (x, y) => {
    const step = steps[at];
    cursor.setAttribute("x1", px(step));
    cursor.setAttribute("x2", px(step));
    cursor.setAttribute("visibility", "visible");
    showTip([el("div.soft", null, `step ${Math.round(step).toLocaleString("en")}`),
      series.map((s) => rowsAt(s, step, options.format))], x, y);
  };
  const leave = () => {
    hideTip();
    cursor.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) /
      (width - MARGIN.left - MARGIN.right);
    at = nearest(steps, xRange[0] + share * (xRange[1] - xRange[0]));
    show(event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") leave();
    if (!(event.key in move)) return;
    event.preventDefault();
    at = Math.max(0, Math.min(steps.length - 1, at + move[event.key]));
    const box = picture.getBoundingClientRect();
    show(box.left + px(steps[at]), box.top + HEIGHT / 2);
  });
}

// A card with a chart; its space is reserved before the chart is drawn.
function chart(title, unit, series, options = {}) {
  const [format, axis] = isShare(unit) ? [percent, onAxis] : [number, number];
  const lasts = series.map((s) => {
    const ys = s.y || s.blocks.mean;
    return el("span.last", null, series.length > 1 && dot(s.run),
      format(known(s.last) ? s.last : ys[ys.length - 1]));
  });
  const label = `${title}: ${series.map((s, i) =>
    `${s.label}, last ${lasts[i].textContent}`).join("; ")}`;
  const plot = drawn(el("div.plot"), (node, width) =>
    draw(node, width, series, { format, axis, label, ...options }));
  return el("div.card.chart", { title: options.name || false },
    el("div.head", null, el("h3", null, title), el("span.soft.small", null, unit),
      el("span.push.head", null, lasts)), plot);
}
