// Curves of all metrics, by kind and by domain.

const settings = { smooth: 0, log: false, x: "step", find: "", hidden: new Set() };
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
const mainMetrics = () => MAIN.filter((name) => metricNames().includes(name)).slice(0, 8);

// reward/DOMAIN/mean: the part between the first and the last slash.
const domainOf = (name) => (name.match(/^[^/]+\/(.+)\/[^/]+$/) || [])[1];

function curveSections() {
  const sections = new Map();
  for (const name of metricNames()) {
    const domain = domainOf(name);
    const title = domain
      ? `Domain ${domain}`
      : SECTIONS.find(([, pattern]) => pattern.test(name))[0];
    sections.set(title, [...(sections.get(title) || []), name]);
  }
  const place = (title) => {
    const i = SECTIONS.findIndex(([t]) => t === title);
    return i < 0 ? 1.5 : i;
  };
  return [...sections].sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b));
}

function curvesView(chosen) {
  const body = el("div", {});
  const draw = () =>
    body.replaceChildren(
      ...curveSections().flatMap(([title, names]) => {
        const found = names
          .filter((name) => name.includes(settings.find))
          .sort((a, b) => rank(a) - rank(b));
        return found.length
          ? [
              el("h2", {}, title),
              el(
                "div",
                { class: "charts" },
                found.map((name) => figure(name, name === chosen)),
              ),
            ]
          : [];
      }),
    );
  draw();
  if (chosen && !isUpdating)
    requestAnimationFrame(() =>
      body.querySelector("figure.chosen")?.scrollIntoView({ block: "center" }),
    );
  return [curveControls(draw), body];
}

function curveControls(draw) {
  const set = (name) => (value) => {
    settings[name] = value;
    draw();
  };
  const runs = data.runs.map((run, i) =>
    el(
      "label",
      {},
      checkbox(!settings.hidden.has(i), (isShown) => {
        settings.hidden[isShown ? "delete" : "add"](i);
        draw();
      }),
      runName(run),
      el("span", { class: "faint" }, differingOptions(i)),
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
  const parts = Object.entries(data.differences).map(
    ([name, values]) => `${name}=${optionText(values[index])}`,
  );
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

function figure(name, isChosen = false) {
  const readout = el("div", { class: "readout" });
  const node = el(
    "figure",
    { class: isChosen ? "chosen" : "", "data-metric": name },
    el("figcaption", { title: meaning(name) }, name),
    readout,
  );
  const series = data.runs
    .map((run, i) => ({ name: run.name, index: i, color: color(i), points: points(run, name) }))
    .filter((s) => s.points.length && !settings.hidden.has(s.index));
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
  whenVisible(node, () => {
    const { svg, note } = chart(series, {
      log: settings.log,
      smooth: settings.smooth,
      xLabel: settings.x,
      hover: say,
      click: open,
    });
    node.append(svg);
    if (note) node.append(el("div", { class: "readout" }, note));
  });
  return node;
}
