// Where the time of each step went: stacked bars of the metrics time/*.

const MAX_BARS = 120;
const BARS_HELP =
  "Each bar is a step, or the mean of several; a click shows its samples below. " +
  "time/evaluate is not part of time/step.";
// Not parts: the sum itself, and the part of time/train that trains the critic.
const NO_PARTS = ["time/step", "time/critic"];

function timeParts(run) {
  const others = Object.keys(run.metrics).filter(
    (name) => name.startsWith("time/") && !NO_PARTS.includes(name),
  );
  const known = data.phases.map((name) => `time/${name}`).filter((name) => others.includes(name));
  return [...new Set([...known, ...others])];
}

function timesView(runIndex = 0, step = null) {
  const index = Number(runIndex),
    run = data.runs[index];
  if (!run) return [el("p", {}, "There is no such run in this page.")];
  const choose = select(
    data.runs.map((r, i) => [i, r.name]),
    index,
    (i) => {
      location.hash = hash("time", i);
    },
  );
  return [
    el("div", { class: "controls" }, label("run", choose)),
    stackedBars(run, index),
    ...timelineView(run, index, step === null ? null : Number(step)),
  ];
}

// Bars of equally many steps each, with the mean seconds of every part.
function bars(run) {
  const parts = timeParts(run);
  const hasTimes = ({ i }) => parts.some((name) => run.metrics[name][i] !== null);
  const rows = run.metrics.step.map((step, i) => ({ step, i })).filter(hasTimes);
  const size = Math.ceil(rows.length / MAX_BARS) || 1,
    found = [];
  for (let start = 0; start < rows.length; start += size) {
    const part = rows.slice(start, start + size);
    const mean = (name) =>
      part.reduce((sum, { i }) => sum + (Number(run.metrics[name][i]) || 0), 0) / part.length;
    found.push({
      from: part[0].step,
      to: part.at(-1).step,
      seconds: Object.fromEntries(parts.map((name) => [name, mean(name)])),
    });
  }
  return found;
}

function stackedBars(run, index) {
  const found = bars(run),
    parts = timeParts(run);
  if (!found.length) return el("p", { class: "faint" }, "metrics.jsonl has no times (time/*).");
  const readout = el("div", { class: "readout" }, BARS_HELP);
  const total = (bar) => Object.values(bar.seconds).reduce((a, b) => a + b, 0);
  const width = pageWidth(),
    height = 220,
    left = 46,
    bottom = 18;
  const y = scale([0, Math.max(...found.map(total)) || 1], [height - bottom, 6]);
  const each = (width - left - RIGHT) / found.length;
  const svg = el(
    "svg:svg",
    { viewBox: `0 0 ${width} ${height}`, id: "bars" },
    y.ticks.flatMap((t) => [
      el("svg:line", { class: "grid", x1: left, x2: width, y1: y.place(t), y2: y.place(t) }),
      el("svg:text", { x: left - 4, y: y.place(t) + 3, "text-anchor": "end" }, `${tickText(t)} s`),
    ]),
  );
  found.forEach((bar, i) => {
    const open = () => {
      location.hash = hash("time", index, bar.to);
    };
    const steps = bar.from === bar.to ? `step ${bar.to}` : `steps ${bar.from} to ${bar.to}, mean`;
    const say = () => {
      readout.textContent = `${steps}: ${parts.map((name) => `${name.slice(5)} ${number(bar.seconds[name])} s`).join(", ")}`;
    };
    let below = 0;
    for (const [k, name] of parts.entries()) {
      const top = y.place(below + bar.seconds[name]);
      svg.append(
        el("svg:rect", {
          class: "bar",
          x: left + i * each,
          width: Math.max(0.5, each * 0.88),
          y: top,
          height: Math.max(0, y.place(below) - top),
          fill: color(k),
          "data-part": name,
          "data-step": bar.to,
          onpointermove: say,
          onclick: open,
        }),
      );
      below += bar.seconds[name];
    }
    if (i % Math.ceil((found.length * 60) / width) === 0)
      svg.append(
        el(
          "svg:text",
          { x: left + (i + 0.44) * each, y: height - 5, "text-anchor": "middle" },
          bar.from,
        ),
      );
  });
  const legend = parts.map((name, k) => el("span", {}, dot(color(k)), name.slice(5)));
  return el(
    "div",
    {},
    el("h2", {}, "Seconds of a step"),
    el("div", { class: "controls" }, legend),
    readout,
    svg,
  );
}
