// Curves of all metrics, by kind and by domain.

const settings = {
  smooth: 0,
  log: false,
  x: "step",
  find: "",
  hidden: new Set(),
  withConstants: new Set(), // titles of sections
};
const X_LABELS = { step: "step", seconds: "s" };
const MAX_COLUMNS = 4;
// Metrics between 0 and 1: their axis does not depend on their values.
const SHARE =
  /^loss\/rejected$|[/_](share|fraction|accuracy|success|truncated|outside|mfu|tail|(equal|solved)_groups|pass@\d+)$|\/end_\w+$/;
const MAIN = [
  "reward/mean",
  "eval/pass@1",
  "eval/reward",
  "eval/loss",
  "loss/loss",
  "loss/entropy",
  "loss/grad_norm",
  "rollout/reply_tokens",
  "mismatch/logprob_mean",
  "train/tokens_per_second",
  "time/step",
];
const SECTIONS = [
  ["Reward", /^reward\//],
  ["Evaluation", /^eval\//],
  ["Lengths and episodes", /^rollout\/(reply_tokens|longest_reply|truncated|turns|sequences|end_)/],
  ["Loss, entropy, gradient, advantages", /^(loss|critic|advantage)\//],
  ["Policy: ratio, clipping, KL to a reference", /^(policy|reference)\//],
  ["Mismatch of engine and trainer", /^mismatch\//],
  ["Speed and time", /^(time\/|.*tokens_per_second)/],
  ["Rollout and staleness", /^rollout\//],
  ["Other", /./],
];

function metricNames() {
  const names = new Set(data.runs.flatMap((run) => Object.keys(run.metrics)));
  return [...names].filter((name) => !["step", "time", "seconds"].includes(name));
}

// Main metrics come first; the others stay in the order in which they were recorded.
const rank = (name) => (MAIN.includes(name) ? MAIN.indexOf(name) : MAIN.length);
// With rewards of 0 and 1 alone, both curves are one.
const isRepeated = (name) =>
  name === "eval/reward" &&
  data.runs.every(({ metrics: m }) => String(m[name]) === String(m["eval/pass@1"]));
const mainMetrics = () => {
  const names = metricNames(),
    pinned = pins().filter((name) => names.includes(name));
  const others = MAIN.filter(
    (name) => names.includes(name) && !pinned.includes(name) && !isRepeated(name),
  );
  return [...pinned, ...others.slice(0, 8)];
};

// Metrics that the reader wants first.
const pins = () => remembered("pins", []);

function togglePin(name) {
  const others = pins().filter((pin) => pin !== name);
  remember("pins", others.length < pins().length ? others : [...others, name]);
  update();
}

// A curve of one value says no more than the value.
function isConstant(name) {
  const values = data.runs
    .flatMap((run) => run.metrics[name] || [])
    .filter((value) => value !== null);
  return values.length > 1 && values.every((value) => value === values[0]);
}

// reward/DOMAIN/mean: the part between the first and the last slash.
const domainOf = (name) => (name.match(/^[^/]+\/(.+)\/[^/]+$/) || [])[1];

function curveSections() {
  const sections = new Map();
  const pinned = pins().filter((name) => metricNames().includes(name));
  if (pinned.length) sections.set("Pinned", pinned);
  for (const name of metricNames().filter((other) => !pinned.includes(other))) {
    const domain = domainOf(name);
    const title = domain
      ? `Domain ${domain}`
      : SECTIONS.find(([, pattern]) => pattern.test(name))[0];
    sections.set(title, [...(sections.get(title) || []), name]);
  }
  const place = (title) => {
    const i = SECTIONS.findIndex(([t]) => t === title);
    return title === "Pinned" ? -1 : i < 0 ? 1.5 : i;
  };
  return [...sections].sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b));
}

function curvesView(chosen) {
  const body = el("div", {});
  const draw = () =>
    body.replaceChildren(
      ...curveSections().flatMap(([title, names]) => curveSection(title, names, chosen) || []),
    );
  draw();
  if (chosen && !isUpdating)
    requestAnimationFrame(() =>
      body.querySelector("figure.chosen")?.scrollIntoView({ block: "center" }),
    );
  return [curveControls(draw), body];
}

// The curves of a section; without constant ones, unless they are what the reader wants to see.
function curveSection(title, names, chosen) {
  const found = names
    .filter((name) => name.includes(settings.find))
    .sort((a, b) => (title === "Pinned" ? 0 : rank(a) - rank(b)));
  if (!found.length) return null;
  const isWanted = (name) => settings.find || title === "Pinned" || name === chosen;
  const constants = found.filter((name) => !isWanted(name) && isConstant(name));
  const node = fold(
    title,
    true,
    charts(
      found.filter((name) => !constants.includes(name)),
      chosen,
    ),
    constants.length ? constantCurves(title, constants) : null,
  );
  if (found.includes(chosen)) node.open = true;
  return node;
}

// A line that says how many are hidden, with their values; a click shows them.
function constantCurves(title, names) {
  if (settings.withConstants.has(title)) return charts(names);
  const node = el("p", { class: "faint constants" });
  const show = () => {
    settings.withConstants.add(title);
    node.replaceWith(charts(names));
  };
  const many = names.length === 1 ? "1 constant curve" : `${names.length} constant curves`;
  node.append(
    el("button", { onclick: show }, `show ${many}`),
    " ",
    names.map((name) => `${name} ${number(lastOf(name))}`).join(", "),
  );
  return node;
}

const lastOf = (name) =>
  data.runs.flatMap((run) => run.metrics[name] || []).findLast((value) => value !== null);

// Rows of about equally many curves, so that none has a gap at its end.
function charts(names, chosen) {
  const columns = Math.ceil(names.length / Math.ceil(names.length / MAX_COLUMNS));
  const flexBasis = `min(100%, max(320px, ${100 / columns}% - 10px))`;
  return el(
    "div",
    { class: "charts" },
    names.map((name) => figure(name, name === chosen, { flexBasis })),
  );
}

function curveControls(draw) {
  const set = (name) => (value) => {
    settings[name] = value;
    draw();
  };
  const runs = data.runs.map((run, i) =>
    el(
      "label",
      { class: "of-run" },
      checkbox(!settings.hidden.has(i), (isShown) => {
        settings.hidden[isShown ? "delete" : "add"](i);
        draw();
      }),
      runName(run),
      el("span", { class: "faint" }, " ", differingOptions(i)),
    ),
  );
  return el(
    "div",
    { class: "controls", id: "curve-controls" },
    label(
      "find",
      el("input", {
        value: settings.find,
        placeholder: "reward",
        oninput: (e) => set("find")(e.target.value),
      }),
    ),
    label(
      "smoothing",
      el("input", {
        type: "range",
        min: 0,
        max: 0.99,
        step: 0.01,
        value: settings.smooth,
        oninput: (e) => set("smooth")(Number(e.target.value)),
      }),
    ),
    label("log axis", checkbox(settings.log, set("log"))),
    label(
      "over",
      select(
        [
          ["step", "steps"],
          ["seconds", "seconds of running"],
        ],
        settings.x,
        set("x"),
      ),
    ),
    runs.length > 1 ? runs : null,
  );
}

function differingOptions(index) {
  const parts = Object.entries(data.differences)
    .filter(([, values]) => values[index] !== null)
    .map(([name, values]) => `${name}=${optionEnd(values[index])}`);
  return parts.slice(0, 6).join(" ");
}

// The points of a metric; [x, y, step].
function points(run, name) {
  const values = run.metrics[name] || [],
    xs = run.metrics[settings.x],
    steps = run.metrics.step;
  const found = [];
  values.forEach((value, i) => {
    if (value !== null) found.push([Number(xs[i]), Number(value), steps[i]]);
  });
  return found;
}

// What report/metrics.py says of a metric.
const meaning = (name) => data.runs.map((run) => run.meanings[name]).find(Boolean) || "";

function figure(name, isChosen, style) {
  const readout = el("span", { class: "readout" }),
    plot = el("div", { class: "plot" }),
    note = el("div", { class: "note-of-chart" });
  const isPinned = pins().includes(name);
  const pin = el(
    "button",
    {
      class: "pin",
      title: isPinned ? "pinned: a click puts it back" : "pin: show this curve first",
      "aria-pressed": isPinned,
      onclick: () => togglePin(name),
    },
    isPinned ? "★" : "☆",
  );
  const series = data.runs
    .map((run, i) => ({ name: run.name, index: i, color: color(i), points: points(run, name) }))
    .filter((s) => s.points.length && !settings.hidden.has(s.index));
  const sayLast = () =>
    readout.replaceChildren(
      ...series.map((s) =>
        el("span", {}, series.length > 1 ? dot(s.color) : null, el("b", {}, lastText(s)), "  "),
      ),
    );
  const say = (found) =>
    readout.replaceChildren(
      ...found.map((p) =>
        el(
          "span",
          {},
          dot(p.series.color),
          `${settings.x} ${number(p.x)}: ${number(p.y)}${settings.smooth ? ` (smoothed ${number(p.smooth)})` : ""}  `,
        ),
      ),
    );
  // A click shows the samples of the step: from the trend to what the model wrote.
  const open = ([p]) => {
    if (!p) return;
    const step = p.series.points.find((q) => q[0] === p.x)[2],
      run = data.runs[p.series.index];
    const samples = samplesNear(run, step);
    if (samples) location.hash = hash("rollouts", p.series.index, samples);
  };
  whenVisible(plot, (width) => {
    const drawn = chart(series, width, {
      log: settings.log,
      smooth: settings.smooth,
      xLabel: X_LABELS[settings.x],
      isShare: SHARE.test(name),
      hover: (found) => (found.length ? say(found) : sayLast()),
      click: open,
    });
    plot.replaceChildren(drawn.svg);
    note.textContent = drawn.note;
  });
  sayLast();
  const caption = el("figcaption", { title: meaning(name) }, pin, el("span", {}, name), readout);
  const className = `${isChosen ? "chosen " : ""}${series.length > 1 ? "several" : ""}`;
  return el("figure", { class: className, "data-metric": name, style }, caption, plot, note);
}

const lastText = (series) => number(series.points.at(-1)[1]);
