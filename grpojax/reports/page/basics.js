// Functions that all parts use. Data of the runs reach the page only through text
// nodes and known attributes, never through innerHTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MAIN = document.getElementById("main");
const SVG = "http://www.w3.org/2000/svg";

function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      parent.append(child);
    }
  }
  return parent;
}

// Makes an element: el("p.soft.small", {title: "..."}, "text", child, ...).
function el(tagAndClasses, attributes, ...children) {
  const [tag, ...classes] = tagAndClasses.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  return append(node, children);
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    node.setAttribute(name, value);
  }
  return append(node, children);
}

const color = (run) => `var(--run${run % 8})`;

function dot(run) {
  const node = el("span.dot", { "aria-hidden": "true" });
  node.style.color = color(run);
  return node;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

// Formats a number with four digits.
function number(value) {
  if (!known(value)) return "\u2013";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(4)).replace("-", "\u2212");
}

// Formats a share in percent, without a sign if it rounds to 0.
const percent = (value) => known(value) ?
  `${(100 * value).toFixed(1)}%`.replace(/^-(?=0\.0%)/, "").replace("-", "\u2212") :
  "\u2013";

const onAxis = (value) => `${+(100 * value).toPrecision(3)}%`.replace("-", "\u2212");

const isShare = (unit) => unit.startsWith("share");

function signed(value, format) {
  const text = format(value);
  return value > 0 && text !== "0.0%" ? `+${text}` : text;
}

// Formats an interval; without a `high` it is unbounded: JSON has null for infinity.
function interval(low, high, format) {
  if (!known(low)) return "";
  return known(high) ? `[${format(low)}, ${format(high)}]` : `[${format(low)}, \u221e)`;
}

function seconds(value) {
  if (!known(value)) return "\u2013";
  const whole = Math.round(value);
  if (whole < 60) return `${whole}s`;
  const two = (x) => String(x).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
}

// Characters that change the text around them (terminal colours, writing
// direction) or are invisible. `visible` replaces them by their codes.
const ACTING = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b-\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]", "g");

function visible(text) {
  return text.replace(ACTING, (character) => {
    const code = character.charCodeAt(0).toString(16).toUpperCase();
    return `\u27e8U+${code.padStart(4, "0")}\u27e9`;
  });
}

// All parts share one tooltip.
const TIP = el("div.tip", { hidden: true, role: "status" });
document.body.append(TIP);

function showTip(children, x, y) {
  TIP.replaceChildren();
  append(TIP, [children]);
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect();
  const right = document.documentElement.clientWidth - box.width - 8;
  const below = y + 18 + box.height < window.innerHeight;
  TIP.style.left = `${Math.max(8, Math.min(x + 14, right))}px`;
  TIP.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 12)}px`;
}

function hideTip() {
  TIP.hidden = true;
}

function tipRow(name, value) {
  return el("div.row", null, el("span", null, name), el("span", null, value));
}

// Calls draw(node, width) when the node comes into view, and when its width
// changes: charts out of view cost nothing.
const drawings = new WeakMap();
const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const drawing = drawings.get(target);
    if (!drawing.seen || Math.round(contentRect.width) === drawing.width) continue;
    drawing.width = Math.round(contentRect.width);
    if (drawing.width) drawing.draw(target, drawing.width);
  }
});
const entered = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const drawing = drawings.get(target);
    if (!isIntersecting || drawing.seen) continue;
    drawing.seen = true;
    drawing.width = Math.round(target.clientWidth);
    drawing.draw(target, drawing.width);
  }
}, { rootMargin: "400px" });

function drawn(node, draw) {
  drawings.set(node, { draw, seen: false, width: 0 });
  entered.observe(node);
  resized.observe(node);
  return node;
}

// Adds a part to the page, and to the navigation at the top.
const PARTS = [];

function part(id, title, text, ...children) {
  PARTS.push([id, title]);
  const section = el("section", { id, "aria-label": title });
  append(section, [el("h2", null, title), text && el("p.soft", null, text), children]);
  MAIN.append(section);
  return section;
}
