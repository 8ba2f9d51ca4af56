// Overview, curves, rewards by step, and differences between runs.
function last(run, name) {
  const curve = run.curves[name];
  return curve ? curve.last : null;
}

function ends(run, name) {
  const curve = run.curves[name];
  if (!curve || !curve.low) return null;
  const at = (i) => [curve.y[i], curve.low[i], curve.high[i]];
  return [at(0), at(curve.y.length - 1)];
}

function fact(name, value) {
  return value === null ? null : el("div", null, el("dt", null, name),
    el("dd", null, value));
}

// Accuracy before and after training, and the paired difference if it is known. A
// run with an environment shows its mean return instead, with a line of accuracy.
function gain(run) {
  const accuracy = ends(run, "accuracy");
  if (!accuracy) return el("p.soft", null, "Not evaluated yet.");
  const once = run.curves.accuracy.y.length === 1;
  const change = ([before, after], text) => once ? text(after[0]) :
    `${text(before[0])} \u2192 ${text(after[0])}`;
  const returns = run.episodes && ends(run, "held_out_reward");
  const [shown, text] = returns ? [returns, number] : [accuracy, percent];
  const [before, after] = shown;
  const paired = run.gain;
  return [
    el("div.head", null,
      el("span.soft", null, returns ? "Held-out mean return" : "Held-out accuracy"),
      el("span.big", null, change(shown, text))),
    el("div.soft.small", null, `95% ${once ? "" :
      `${interval(before[1], before[2], text)} \u2192 `}${
      interval(after[1], after[2], text)}`),
    returns && el("div.small", null, `accuracy ${change(accuracy, percent)}`),
    paired && el("div.small", null, el(paired.low > 0 ? "span.good" : paired.high < 0 ?
      "span.bad" : "span", null, signed(paired.difference, percent)),
      ` ${interval(paired.low, paired.high, percent)} on the same ${paired.prompts} ` +
      `prompts, p = ${number(paired.p_value)}`),
  ];
}

// G* from all diagnoses, which a run prints at its end.
function bestSize(run) {
  if (!run.groupSize) return null;
  const { best, low, high } = run.groupSize;
  const size = (value) => value.toFixed(1);
  return `${known(best) ? size(best) : "\u221e"} ${interval(low, high, size)}`;
}

function runCard(run, i) {
  const failures = run.failures.total;
  return el("article.card", null,
    el("div.head", null, el("h3", null, dot(i), visible(run.name)),
      el(`span.pill.push${{ good: ".good", bad: ".bad" }[run.verdict.level] ||
        (run.finished ? "" : ".warn")}`, null, run.status)),
    gain(run),
    el("dl.facts", null,
      fact("reward", run.curves.reward_mean ? number(last(run, "reward_mean")) : null),
      fact("training time", run.curves.train_seconds ?
        seconds(last(run, "train_seconds")) : null),
      fact("time per step", run.speed.length ? `${number(run.speed[run.speed.length - 1].median)
      } s` : null),
      fact("best group size", bestSize(run)),
      fact("truncated", run.curves.truncated ? percent(last(run, "truncated")) : null),
      fact("groups without variance", run.curves.zero_variance_groups ?
        percent(last(run, "zero_variance_groups")) : null),
      fact("failed rewards", failures ? String(failures) : null)),
    run.notes.map((note) => el("p.note.small", null, visible(note))));
}

function overview() {
  append(document.getElementById("top"), [el("h1", null, RUNS.length === 1 ?
    visible(RUNS[0].name) : `${RUNS.length} runs`), RUNS.map(({ verdict, name }, i) =>
    el(`p.verdict${verdict.level && `.${verdict.level}`}`, null, RUNS.length > 1 &&
      [dot(i), `${visible(name)}: `], visible(verdict.text)))]);
  const section = part("overview", "Overview", null,
    el("div.grid.cards", null, RUNS.map(runCard)));
  section.querySelector("h2").hidden = RUNS.length === 1;
}

function legend() {
  return RUNS.length === 1 ? null : el("div.legend.small", null,
    RUNS.map((run, i) => el("span", null, dot(i), visible(run.name))));
}

function seriesOf(name) {
  return RUNS.flatMap((run, i) => run.curves[name] ?
    [{ run: i, label: visible(run.name), ...run.curves[name] }] : []);
}

// Metrics that never change are listed as text, not drawn.
function isConstant(metric) {
  const values = seriesOf(metric.name).flatMap((s) => [...s.y, ...(s.low || [])]);
  return values.every((value) => value === values[0]);
}

function constants(metrics) {
  return el("p.soft.small.constants", null, "Constant: ", metrics.map((metric, i) => [
    i ? ", " : "", el("span", { title: visible(metric.name) }, `${visible(metric.title
    )} `, el("b", null, (isShare(metric.unit) ? percent : number)(
      seriesOf(metric.name)[0].y[0])))]));
}

const METRICS = DATA.layout.flatMap((group) => group.metrics);

// Of metrics with equal points in all runs, only the first is drawn.
const points = (metric) => JSON.stringify(seriesOf(metric.name).map((s) => [s.run, s.x, s.y]));
const SAME = new Map([...METRICS].reverse().map((metric) => [points(metric), metric]));

function repeats(metrics) {
  return el("p.soft.small.constants", null, metrics.map((metric) => el("div", null,
    `${visible(metric.name)}: the same as ${visible(SAME.get(points(metric)).title)}`)));
}

// Metrics with signs of trouble come first, in order of frequency.
function groupsByTrouble() {
  const names = [...new Set(RUNS.flatMap((run) => run.troubled))];
  const troubled = names.flatMap((name) => METRICS.filter((metric) => metric.name === name));
  const others = DATA.layout.map((group) => ({ ...group,
    metrics: group.metrics.filter((metric) => !troubled.includes(metric)) }));
  return [{ title: "Signs of trouble", text: "The most frequent comes first; see " +
    "docs/troubleshooting.md.", metrics: troubled }, ...others].filter(
    (group) => group.metrics.length);
}

function curves() {
  const section = part("curves", "Curves", "A faint line shows each step, a bold line " +
    "means of blocks of steps with Student's 95% interval, which treats steps as " +
    "independent. Evaluations and diagnoses have their own intervals. Point at a chart, " +
    "or focus it and use the arrow keys.", legend());
  if (!DATA.layout.length) section.append(el("p.card.empty", null, "No metrics yet."));
  groupsByTrouble().forEach((group, i) => {
    const box = el("details.group", { open: i < 5 }, el("summary", null,
      el("h2", null, group.title)), group.text && el("p.soft", null, group.text));
    const charts = el("div.grid.charts");
    const varying = group.metrics.filter((metric) => !isConstant(metric));
    const repeated = varying.filter((metric) => SAME.get(points(metric)) !== metric);
    for (const metric of varying.filter((item) => !repeated.includes(item))) {
      charts.append(chart(visible(metric.title), metric.unit, seriesOf(metric.name),
        { name: visible(metric.name) }));
    }
    box.append(charts);
    const same = group.metrics.filter(isConstant);
    if (same.length) box.append(constants(same));
    if (repeated.length) box.append(repeats(repeated));
    section.append(box);
  });
}

// Shares of rewards by step; a stronger colour means more completions.
function heat(node, width, picture, run) {
  const [left, right, top, bottom] = [64, 6, 6, 24];
  const rows = picture.values.length;
  const high = Math.max(110, Math.min(300, 18 * rows));
  const w = (width - left - right) / picture.steps.length;
  const h = high / rows;
  const name = ([a, b]) => (a === b ? number(a) : `${number(a)} \u2026 ${number(b)}`);
  const cells = picture.shares.flatMap((column, i) => column.map((share, j) => {
    if (!share) return null;
    const cell = svg("rect", { x: left + i * w, y: top + high - (j + 1) * h + 0.5,
      width: Math.max(w - (w > 5 ? 1 : 0), 0.5), height: Math.max(h - 1, 1),
      "fill-opacity": (0.07 + 0.93 * share ** 0.7).toFixed(3) });
    cell.style.fill = color(run);
    cell.dataset.at = `${i} ${j}`;
    return cell;
  }));
  const every = Math.ceil(rows / Math.floor(high / 14));
  const names = picture.values.map((value, j) => j % every ? null : svg("text", {
    x: left - 8, y: top + high - (j + 0.5) * h + 4, "text-anchor": "end" },
    number(value[0])));
  const count = picture.steps.length;
  const labelled = [...new Set([0, Math.floor((count - 1) / 2), count - 1])];
  const steps = labelled.map((i) => svg("text", { x: left + (i + 0.5) * w,
    y: top + high + 17, "text-anchor": i ? (i === count - 1 ? "end" : "middle") :
    "start" }, `step ${picture.steps[i][i && i === count - 1 ? 1 : 0].toLocaleString("en")}`));
  const image = svg("svg", { viewBox: `0 0 ${width} ${top + high + bottom}`,
    role: "img", "aria-label": "Shares of rewards by step" }, cells, names, steps);
  node.style.height = `${top + high + bottom}px`;
  image.addEventListener("pointermove", (event) => {
    const at = event.target.dataset && event.target.dataset.at;
    if (!at) return hideTip();
    const [i, j] = at.split(" ").map(Number);
    const [a, b] = picture.steps[i];
    showTip([el("div.soft", null, a === b ? `step ${a}` : `steps ${a} to ${b}`),
      tipRow(`reward ${name(picture.values[j])}`, percent(picture.shares[i][j]))],
      event.clientX, event.clientY);
  });
  image.addEventListener("pointerleave", hideTip);
  node.replaceChildren(image);
}

function rewards() {
  const cards = RUNS.map((run, i) => el("div.card.chart", null,
    el("div.head", null, el("h3", null, RUNS.length > 1 && dot(i), visible(run.name)),
      el("span.soft.small", null, run.rewards ? `${number(run.rewards.total)} rewards` :
        "")),
    run.rewards ? drawn(el("div.plot"), (node, width) =>
      heat(node, width, run.rewards, i)) :
      el("p.empty", null, "No rewards: reward.on_device keeps them on the device, or " +
        "the run has saved none yet.")));
  part("rewards", "Rewards by step", "A stronger colour means that more of a " +
    "step's completions have the reward.", el("div.grid.cards", null, cards));
}

function differenceTable(compared, run) {
  const rows = compared.steps.map((row) => {
    const clear = row.low > 0 || row.high < 0;
    return el("tr", null, el("td.mono", null, row.metric),
      el("td.num", null, number(row.mean_a)), el("td.num", null, number(row.mean_b)),
      el("td.num", null, clear ? el("b", null, signed(row.difference, number)) :
        signed(row.difference, number), ` ${interval(row.low, row.high, number)}`),
      el("td.num", null, number(row.p_value)), el("td.num", null, String(row.steps)));
  });
  return rows.length && el("div.card.scroll", null, el("table", null, el("thead", null,
    el("tr", null, el("th", null, "metric"), el("th.num", null, visible(RUNS[0].name)),
      el("th.num", null, visible(RUNS[run].name)),
      el("th.num", null, "difference, 95%"), el("th.num", null, "p"),
      el("th.num", null, "steps"))), el("tbody", null, rows)));
}

function differences() {
  if (RUNS.length < 2) return;
  const boxes = DATA.compared.map((compared, k) => {
    const run = k + 1;
    const along = compared.heldOut;
    const label = visible(RUNS[run].name);
    const cards = along.length ? [chart("Held-out accuracy", "share of prompts", [{
      run, label, x: along.map((e) => e.step), y: along.map((e) => e.difference),
      low: along.map((e) => e.low), high: along.map((e) => e.high) }], { zero: true })] :
      [];
    const same = (row) => row.blocks.low.every((low, i) => !low && !row.blocks.high[i]);
    for (const row of compared.steps.filter((step) => !same(step))) {
      const metric = DATA.layout.flatMap((g) => g.metrics).find(
        (m) => m.name === row.metric);
      cards.push(chart(metric.title, metric.unit, [{ run, label, blocks: row.blocks,
        last: row.difference }], { zero: true, name: row.metric }));
    }
    const prompts = along.length ? `${along[along.length - 1].prompts} held-out prompts, ` +
      "the same for both" : "no held-out prompts in common";
    return [el("h3.family", null, dot(run), `${label} minus ${visible(RUNS[0].name)}`,
      el("span.soft.small", null, `  ${prompts}`)),
    el("div.grid.charts", null, cards), el("div.family", null,
      differenceTable(compared, run)), !cards.length && el("p.card.empty", null,
        "The runs have too little in common to be compared.")];
  });
  part("differences", "Differences", "Each run minus the first, paired by step or " +
    "prompt, with 95% intervals: Agresti and Min's for held-out answers, Student's over " +
    "blocks of steps for metrics. They describe these runs, not other seeds.", boxes);
}
